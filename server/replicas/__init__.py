"""Several engines behind one API: the choice of a replica, and what crosses between processes.

Nothing here knows Ray or HTTP. Nothing here is imported before replicas are asked for.
"""
