"""Convert text to tokens and back with a fast (tokenizers) tokenizer of transformers."""

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from ropewalk.model_runtime.errors import ModelError, RequestError
from ropewalk.model_runtime.text.chat_template import own_templates
from ropewalk.model_runtime.text.sample_text import SAMPLE_TEXT

_LONGEST_PROBLEM = 200  # characters


class Tokenizer:
    """The server's interface to a tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "is_fast", False):
            raise ModelError(f"{type(tokenizer).__name__} is not a fast tokenizer (tokenizer.json)")
        self._tokenizer = tokenizer
        self._backend: Backend = tokenizer.backend_tokenizer
        # A tokenizer.json may contain either from training; a prompt is never cut or padded.
        self._backend.no_truncation()
        self._backend.no_padding()
        try:
            self._encoding(SAMPLE_TEXT, "text", adds_special=True)
        except RequestError as error:
            raise ModelError(f"the tokenizer cannot encode plain text: {error}") from error
        self._texts: dict[int, str] = {}  # of earlier tokens; bounded by the vocabulary
        self.longest_token = max(map(len, self._backend.get_vocab()), default=1)
        self.eos_token_id: int | None = tokenizer.eos_token_id
        self.class_name = type(tokenizer).__name__
        # bos_token, eos_token, ... -> text, if defined
        self.special_tokens = {
            name: str(token)
            for name, token in tokenizer.special_tokens_map.items()
            if isinstance(token, str)
        }

    @property
    def special_ids(self) -> dict[str, int]:
        """Return the text and id of each token that an answer's text leaves out."""
        added = self._tokenizer.added_tokens_decoder
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def token_id(self, text: str) -> int | None:
        added = self._tokenizer.added_tokens_decoder
        return next((each for each, token in added.items() if token.content == text), None)

    def encode(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> list[int]:
        """Return the token ids of a text, after the special tokens that the model expects.

        A text that begins with these tokens itself has them once. Raises RequestError, which names
        the request's field `param`, for invalid Unicode.
        """
        encoding = self._encoding(text, param, adds_special=add_special_tokens)
        return self._ids_of(encoding, has_leading=add_special_tokens)

    def encode_at_most(
        self, text: str, most: int, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> tuple[int, ...] | None:
        """Return the token ids of a text, or None if there are more than `most`.

        A text far beyond `most` is judged by its beginning. Raises RequestError as `encode` does.
        """
        size = 2 * most
        while size < len(text):
            # The cut may be inside a word, so a beginning has to exceed the limit by a margin.
            beginning = self._encoding(text[:size], param, adds_special=add_special_tokens)
            if len(beginning) > most + most // 4 + self.longest_token:
                return None
            size *= 4
        encoding = self._encoding(text, param, adds_special=add_special_tokens)
        if len(encoding) > most:
            return None
        return tuple(self._ids_of(encoding, has_leading=add_special_tokens))

    def _encoding(self, text: str, param: str, *, adds_special: bool) -> Encoding:
        """Encode a text. Raises RequestError for invalid Unicode."""
        try:
            # Of the library's calls, only those of a batch leave the interpreter to other threads.
            # This one also computes no offsets, and takes two thirds of the time.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=adds_special)
        except (TypeError, UnicodeError) as error:
            raise RequestError(f"`{param}` is not valid Unicode text", param=param) from error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of Rust, as of a pattern that backtracks
            told = str(error).partition("\n")[0][:_LONGEST_PROBLEM]
            raise RequestError(f"`{param}` cannot be tokenised: {told}", param=param) from error
        return encoding

    def _ids_of(self, encoding: Encoding, *, has_leading: bool) -> list[int]:
        """Return the tokens, with the special ones at the beginning once."""
        ids: list[int] = encoding.ids
        leading = self._leading_ids if has_leading else []
        num = len(leading)
        return ids[num:] if num and ids[num : 2 * num] == leading else ids

    def leading_special_ids(self) -> tuple[int, ...]:
        """Return the special tokens before every text; some tokenizers also add some after it."""
        return tuple(self._leading_ids)

    @cached_property
    def _leading_ids(self) -> list[int]:
        bare = self._backend.encode("a", add_special_tokens=False).ids
        whole = self._backend.encode("a").ids
        starts = [at for at in range(len(whole)) if whole[at : at + len(bare)] == bare]
        return list(whole[: starts[0]]) if starts else []

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of tokens; other threads go on meanwhile."""
        (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def token_text(self, token_id: int) -> str:
        r"""Return one token as in OpenAI logprobs: text, or `bytes:\xe2` for a partial character.

        Special tokens are included, unlike in an answer's text.
        """
        text = self._texts.get(token_id)
        if text is None:
            raw = self.token_bytes(token_id)
            try:
                text = raw.decode()
            except UnicodeDecodeError:
                text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
            self._texts[token_id] = text
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token."""
        token: str | None = self._backend.id_to_token(token_id)
        if token is None:
            return b""  # a row of the embedding that no token uses
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes([int(token[3:5], 16)])  # sentencepiece's byte fallback
        text: str = self._backend.decode([token_id], skip_special_tokens=False)
        if "\ufffd" not in text:
            # Sentencepiece tokenizers drop a leading space when they decode one token.
            if token.startswith("\u2581") and not text.startswith(" "):
                text = " " + text
            return text.encode()
        try:
            return bytes(_BYTE_OF_CHARACTER[character] for character in token)
        except KeyError:
            return text.encode()

    def as_json(self) -> tuple[str, int]:
        """Return the whole tokenizer as tokenizer.json text, and the number of its ids."""
        return self._backend.to_str(), max(self._backend.get_vocab().values(), default=-1) + 1

    def own_templates(self) -> dict[str, str]:
        """Return the tokenizer's chat templates by their names. Raises ModelError."""
        return own_templates(self._tokenizer)

    @property
    def special_tokens_map(self) -> Mapping[str, str]:
        """Return the special tokens by the names that chat templates have for them."""
        found: Mapping[str, str] = getattr(self._tokenizer, "special_tokens_map", {})
        return found

    def stream(self) -> "TokenStream":
        return TokenStream(self._backend)


class TokenStream:
    """An incremental decoder that returns whole characters."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._stream = DecodeStream(skip_special_tokens=True)

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; empty while a character is incomplete."""
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception:  # noqa: BLE001  # the library raises Exception itself
            return self._push_anew(token_id)

    def _push_anew(self, token_id: int) -> str:
        # With a byte-fallback tokenizer, bytes that are no valid character break the stream for
        # good. A new stream loses these bytes, but not the following text.
        self._stream = DecodeStream(skip_special_tokens=True)
        try:
            return self._stream.step(self._backend, token_id) or ""
        except Exception:  # noqa: BLE001
            self._stream = DecodeStream(skip_special_tokens=True)
            return ""


def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's alphabet: printable bytes map to themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_of_character()
