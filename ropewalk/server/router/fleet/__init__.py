"""The servers behind the router, and the sum of their pages."""
