"""A model's forward as a flat list of launches, in place of the model's own Python."""
