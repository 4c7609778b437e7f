"""Ray Serve: the API and the engines as its deployments, and the command that starts them.

Ray is imported here only, and only if replicas are asked for.
"""
