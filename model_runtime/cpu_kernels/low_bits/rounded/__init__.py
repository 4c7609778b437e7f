"""Products of rows in eight bits with weights in few bits."""
