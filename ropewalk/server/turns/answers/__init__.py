"""The bodies of the answers of the routes over conversations."""
