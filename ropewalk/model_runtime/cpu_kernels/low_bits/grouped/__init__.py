"""Products of rows with weights in few bits, whose scales multiply the sums of groups."""
