"""Drafts of the next tokens, which one step verifies: where they come from, and how many pay."""
