"""A cache whose full pages are in few bits, on a GPU (docs/design/kv-cache.md)."""
