"""Choices that follow from the GPU that is there."""
