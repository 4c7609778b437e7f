"""A router in front of servers: it chooses one by prefix and load, and continues lost answers."""
