"""The sizes of caches, from the memory that a machine or a GPU has."""
