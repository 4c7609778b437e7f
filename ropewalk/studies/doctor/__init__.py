"""`ropewalk doctor`: whether this machine, its packages and a model are fit to serve."""
