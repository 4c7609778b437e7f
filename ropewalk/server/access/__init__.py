"""The clients and their use: named keys, their bounds, and the access log."""
