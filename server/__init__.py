"""The HTTP service and the `ropewalk` command."""
