"""Pages of prefixes outside of the cache: in files, in a store on the network, in host memory."""
