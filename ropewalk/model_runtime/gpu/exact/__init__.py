"""Products and attention of a GPU whose rows have the same bits in any batch."""
