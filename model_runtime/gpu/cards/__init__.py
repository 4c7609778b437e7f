"""What follows from the GPU that is there."""
