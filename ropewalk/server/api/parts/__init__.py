"""Parts that the bodies of several routes have."""
