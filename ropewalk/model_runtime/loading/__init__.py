"""Load a checkpoint, then patch and check its model."""
