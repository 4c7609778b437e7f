"""Leave out calls that an answer has made before, as the model writes them."""

from model_runtime.tools.call_stream import CallEnd, CallEvent, CallPiece, CallStart


class NewCalls:
    """A filter of calls. A call is held back while it may become one of the calls before it."""

    def __init__(self) -> None:
        self._whole: list[tuple[str, str]] = []  # name and arguments of the calls so far
        self._name = ""
        self._pieces: list[str] = []
        self._num_characters = 0  # of the pieces
        self._alike: list[str] = []  # arguments of calls before that begin with the pieces
        self._held: list[CallEvent] | None = None  # None: the call differs from all before it
        self.num_repeated = 0

    def passed(self, event: CallEvent) -> list[CallEvent]:
        """Return the events that are known to belong to a new call."""
        if isinstance(event, CallStart):
            self._name, self._pieces, self._held, self._num_characters = event.name, [], [], 0
            self._alike = [arguments for name, arguments in self._whole if name == event.name]
        elif isinstance(event, CallPiece):
            self._pieces.append(event.text)
            # Only the new piece is compared: a whole call in pieces would cost its square.
            at = self._num_characters
            self._alike = [each for each in self._alike if each.startswith(event.text, at)]
            self._num_characters += len(event.text)
        is_whole = isinstance(event, CallEnd)
        is_repeated = is_whole and any(len(each) == self._num_characters for each in self._alike)
        if is_whole and not is_repeated:
            self._whole.append((self._name, "".join(self._pieces)))
        if self._held is None:
            return [event]
        self._held.append(event)
        if is_repeated:
            self._held = None
            self.num_repeated += 1
            return []
        if self._alike and not is_whole:
            return []
        held, self._held = self._held, None
        return held
