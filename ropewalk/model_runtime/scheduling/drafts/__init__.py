"""The sources of drafts, and their lengths."""
