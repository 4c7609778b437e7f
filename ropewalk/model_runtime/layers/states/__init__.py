"""Layers that mix tokens by a state of each sequence, over the slots of a step."""
