"""Models named by hub id: their files are downloaded to the hub's cache before anything is read."""
