"""Weights in eight to four bits: their panels, and products that widen them on the way."""
