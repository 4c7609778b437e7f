"""Sizes in bytes as text."""


def size_text(num_bytes: int) -> str:
    """Format bytes in the unit that fits, with three digits or more: 1.5 GiB, 14 MiB, 1023 KiB."""
    size, units = float(num_bytes), ["B", "KiB", "MiB", "GiB"]
    # What rounds to 1,024 of a unit is one of the next.
    while len(units) > 1 and round(size) >= 1024:
        size, units = size / 1024, units[1:]
    return f"{size:.3g} {units[0]}" if size < 999.5 else f"{size:.0f} {units[0]}"
