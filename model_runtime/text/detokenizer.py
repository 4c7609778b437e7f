"""An answer's text as it grows: whole characters, and no further than a stop string."""

from model_runtime.text.tokenizer import Tokenizer

PROMPT_TAIL = 6  # tokens; more than any incomplete character takes


class Detokenizer:
    """One request's text. `push` a token, get what may be sent now."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_ids: tuple[int, ...], stop: tuple[str, ...]
    ) -> None:
        self._stream = tokenizer.stream()
        # A token's text may depend on the ones before it (sentencepiece drops the first space),
        # so the stream has to have seen the end of the prompt.
        for token_id in prompt_ids[-PROMPT_TAIL:]:
            self._stream.push(token_id)
        self._stop = stop
        self._held = ""  # decoded, but it may turn out to begin a stop string
        self.is_stopped = False

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Text that this token makes safe to send; sets `is_stopped` at a stop string.

        With `may_stop` False (before min_tokens) all of it is, whatever it contains.
        """
        self._held += self._stream.push(token_id)
        if not may_stop or not self._stop:
            return self.flush()
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.is_stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        keep = max((_overlap(self._held, stop) for stop in self._stop), default=0)
        split = len(self._held) - keep
        text, self._held = self._held[:split], self._held[split:]
        return text

    def flush(self) -> str:
        """The text held back, when the answer ends without a stop string."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
