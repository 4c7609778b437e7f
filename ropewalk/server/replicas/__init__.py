"""The choice of one of several servers, and the prompts that a router remembers of each.

Nothing here knows Ray or HTTP.
"""
