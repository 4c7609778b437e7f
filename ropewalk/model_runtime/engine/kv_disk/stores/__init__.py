"""Pages in a store on the network."""
