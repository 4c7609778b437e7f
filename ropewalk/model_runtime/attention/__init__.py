"""The paged cache, and its reads and writes by attention layers."""
