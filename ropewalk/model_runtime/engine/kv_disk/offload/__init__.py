"""Pages in the memory of a GPU's host: their copies, and the place that holds them."""
