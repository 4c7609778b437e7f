"""The trace that a request belongs to, by W3C Trace Context (the header `traceparent`)."""

import re

# Version 00 has four fields. A later version may add more after another hyphen.
_FORM = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")


def trace_id_of(traceparent: str) -> str | None:
    """Return the trace id of a header; None if the header is not valid.

    Source: W3C Trace Context, sections 3.2.2 and 3.2.4. The version ff and ids of zeros are
    invalid.
    """
    found = _FORM.fullmatch(traceparent.strip())
    if found is None:
        return None
    version, trace_id, parent_id, more = found.groups()
    is_invalid = version == "ff" or (version == "00" and more is not None)
    is_zero = not trace_id.strip("0") or not parent_id.strip("0")
    return None if is_invalid or is_zero else trace_id
