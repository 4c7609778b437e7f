"""Ray Serve: plain servers as its replicas, and the command that starts them.

Ray is imported here only, and only if replicas are asked for.
"""
