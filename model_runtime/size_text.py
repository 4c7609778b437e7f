"""Format a number of bytes for a reader."""


def size_text(num_bytes: int) -> str:
    """Format bytes in the unit that fits: 1.5 GiB, 14 MiB."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} GiB" if size < 1000 else f"{size:.0f} GiB"
