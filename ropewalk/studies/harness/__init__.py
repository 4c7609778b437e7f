"""Options, progress, tables and plots of the commands that measure a model or a server."""
