"""Text that a terminal may show: what it would obey is escaped."""

_MOST_CHARS = 2000  # of a sentence; a file may have names of any length


def printable(text: str) -> str:
    """Return a text with its control characters and other invisible ones escaped, but line breaks.

    Files of a model hold names and values of any kind, and an escape sequence in one of them could
    rename a window or hide what was printed.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each == "\n" else each.encode("unicode_escape").decode()
        for each in text
    )


def printable_sentence(text: str) -> str:
    """Return a printable text without its middle if it is very long."""
    if len(text) > _MOST_CHARS:
        half = _MOST_CHARS // 2
        text = f"{text[:half]}[{len(text) - 2 * half} characters]{text[-half:]}"
    return printable(text)
