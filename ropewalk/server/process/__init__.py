"""The process before anything heavy is imported, and the machine below it."""
