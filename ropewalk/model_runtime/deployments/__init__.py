"""Served names: their methods, their tiers, and the tier of each request."""
