"""`ropewalk inspect`: tables, costs and attention against distance."""
