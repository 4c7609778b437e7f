"""The path of a request through the service, and the route of completions."""
