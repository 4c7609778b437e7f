"""The playground and the page of the API, whose files in `assets/` need no build."""
