"""Leave out calls that an answer has made before, as the model writes them."""

from model_runtime.tools.call_stream import CallEnd, CallEvent, CallPiece, CallStart


class NewCalls:
    """A filter of calls. A call is held back while it may become one of the calls before it."""

    def __init__(self) -> None:
        self._whole: list[tuple[str, str]] = []  # name and arguments of the calls so far
        self._name = ""
        self._pieces: list[str] = []
        self._held: list[CallEvent] | None = None  # None: the call differs from all before it
        self.num_repeated = 0

    def passed(self, event: CallEvent) -> list[CallEvent]:
        """Return the events that are known to belong to a new call."""
        if isinstance(event, CallStart):
            self._name, self._pieces, self._held = event.name, [], []
        elif isinstance(event, CallPiece):
            self._pieces.append(event.text)
        is_whole = isinstance(event, CallEnd)
        if self._held is None:
            if is_whole:
                self._whole.append((self._name, "".join(self._pieces)))
            return [event]
        self._held.append(event)
        call = self._name, "".join(self._pieces)
        if is_whole and call in self._whole:
            self._held = None
            self.num_repeated += 1
            return []
        if not is_whole and any(map(self._may_become, self._whole)):
            return []
        if is_whole:
            self._whole.append(call)
        held, self._held = self._held, None
        return held

    def _may_become(self, whole: tuple[str, str]) -> bool:
        name, arguments = whole
        return name == self._name and arguments.startswith("".join(self._pieces))
