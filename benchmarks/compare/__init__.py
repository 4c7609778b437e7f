"""Send the same scenarios to two servers in turns."""
