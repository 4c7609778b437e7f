"""All settings, each defined once, and the sources of their values."""
