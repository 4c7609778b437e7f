"""The tokens of the next step, the pages they need, and drafts. Nothing here imports torch."""
