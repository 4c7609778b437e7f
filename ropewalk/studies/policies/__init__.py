"""`ropewalk eval policies`: the same sequences under each policy, across tiers."""
