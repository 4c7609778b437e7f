"""Pages of prefixes in files, which outlive the process: a tier below the cache, on a CPU."""
