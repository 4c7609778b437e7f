"""Incremental decoding of an answer: whole characters, up to a stop string."""

from bisect import bisect_left

from ropewalk.model_runtime.text.tokenizer import Tokenizer

PROMPT_TAIL = 6  # tokens; more than any incomplete character needs


class Detokenizer:
    """The text of one request. `push` adds a token and returns the text to send."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: tuple[int, ...],
        stop: tuple[str, ...],
        shown_ids: frozenset[int] = frozenset(),
        shown_stop: frozenset[str] = frozenset(),
    ) -> None:
        """Take what else belongs to the text: special tokens, and some of the stop strings."""
        self._tokenizer = tokenizer
        self._shown_ids = shown_ids
        self._stream = tokenizer.stream()
        # A token's text may depend on earlier tokens (sentencepiece drops the first space),
        # so the stream first decodes the end of the prompt.
        for token_id in prompt_ids[-PROMPT_TAIL:]:
            self._stream.push(token_id)
        self._stop = stop
        self._sorted_stop = sorted(stop)
        self._longest_stop = max(map(len, stop), default=0)
        self._shown_stop = shown_stop
        self._held = ""  # decoded text that may begin a stop string
        self.num_decoded = 0  # characters of the answer so far, held ones included
        self.stop_string: str | None = None  # the one that ended the text

    @property
    def is_stopped(self) -> bool:
        return self.stop_string is not None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Return the text to send after this token; set `stop_string` if one ends the text.

        If `may_stop` is False (before min_tokens), then all text is safe to send.
        """
        decoded = self._stream.push(token_id)
        if token_id in self._shown_ids:
            decoded += self._tokenizer.token_text(token_id)
        self.num_decoded += len(decoded)
        if not self._stop:
            return decoded
        self._held += decoded
        if not may_stop:
            return self.flush()
        found = [(self._held.find(stop), stop) for stop in self._stop if stop in self._held]
        if found:
            at, self.stop_string = min(found)
            if self.stop_string in self._shown_stop:
                at += len(self.stop_string)
            text, self._held = self._held[:at], ""
            return text
        split = self._first_that_may_stop()
        text, self._held = self._held[:split], self._held[split:]
        return text

    def _first_that_may_stop(self) -> int:
        """Return where the longest end of the held text begins that begins a stop string.

        Among sorted strings, one that begins with a text stands where the text itself would. So
        the time for a character hardly grows with the number of stop strings.
        """
        held, stops = self._held, self._sorted_stop
        for at in range(max(0, len(held) - self._longest_stop + 1), len(held)):
            end = held[at:]
            place = bisect_left(stops, end)
            if place < len(stops) and stops[place].startswith(end):
                return at
        return len(held)

    def flush(self) -> str:
        """Return the text held back, when the answer ends without a stop string."""
        text, self._held = self._held, ""
        return text


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
