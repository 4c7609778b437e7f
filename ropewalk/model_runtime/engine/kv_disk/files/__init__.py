"""Pages in a folder: their files, and the cap on them."""
