"""JSON schemas as grammars over a tokenizer: the allowed next tokens of each answer.

The grammars are those of llguidance. Those of tool calls (`tools/call_grammar.py`) are Lark around
schemas. A schema is not compiled in the event loop or the engine's thread. It is first compiled in
a separate process (`grammar_trial.py`) with limits on time and memory. A schema that passes is
compiled again here, at the same cost.
"""

import json
import subprocess
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from ropewalk.model_runtime.child_process import command_of
from ropewalk.model_runtime.errors import GrammarError, QueueFullError, RequestError
from ropewalk.model_runtime.text.grammar_trial import grammar_of, matcher_of, problem_of
from ropewalk.model_runtime.text.schema_keywords import kept_schema
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.model_runtime.text.whitespace import ONE_SPACE

ANY_OBJECT: Mapping[str, Any] = {"type": "object"}  # for response_format `json_object`
_MAX_TRIAL_BYTES = 32 * 2**20  # ordinary schemas take less than 1 MiB
_NUM_COMPILERS = 2  # at once; each trial keeps a core busy
_MAX_WAITING = 64  # schemas; the server answers more with 429
_NUM_KEPT = 16  # size of the cache of compiled schemas


@dataclass(frozen=True, slots=True, eq=False)
class Grammar:
    """A compiled schema. It is immutable, because answers use copies."""

    matcher: LLMatcher
    num_tokens: int  # number of the tokenizer's ids
    source: "Source"  # what it was compiled from

    @property
    def field(self) -> str:
        return field_of(self.source)

    def begin(self, end_ids: frozenset[int], mask: bytes | None = None) -> "Constraint":
        """Return the state of an answer with these end tokens; a copy takes about 10 us.

        `mask`: one bit for each token that may come at all, lowest first; None: all of them.
        """
        return Constraint(self.matcher.deep_copy(), self.num_tokens, end_ids, mask)


class Constraint:
    """The grammar state of one answer. Only the engine's thread may use it.

    Each sampled token advances it once. If a sequence is preempted and computed again, then its
    tokens are not sampled again.
    """

    def __init__(
        self,
        matcher: LLMatcher,
        num_tokens: int,
        end_ids: frozenset[int],
        mask: bytes | None = None,
    ) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._end_ids = end_ids
        self._mask = None if mask is None else int.from_bytes(mask, "little")
        self.allowed = b""  # one bit per token, lowest first; set by `look`

    def look(self) -> bool:
        """Compute the allowed next tokens; return False if the answer is complete.

        They include end tokens if the grammar may end. Raises GrammarError.
        """
        with _faults():
            allowed = bytearray(self._matcher.compute_bitmask())
            may_end = self._matcher.is_accepting()
        self._check()
        allowed += bytes(max(0, max(self._end_ids, default=0) // 8 + 1 - len(allowed)))
        for token_id in (self._num_tokens, *self._end_ids):
            allowed[token_id // 8] &= ~(1 << token_id % 8)
        allowed = self._masked(allowed)
        if not allowed.strip(b"\0"):
            if may_end:
                return False
            of_ours = "" if self._mask is None else " of `allowed_token_ids`"
            raise GrammarError(f"the grammar allows no token{of_ours}")
        if may_end:
            for token_id in self._end_ids:
                allowed[token_id // 8] |= 1 << token_id % 8
        self.allowed = bytes(self._masked(allowed))
        return True

    def _masked(self, allowed: bytearray) -> bytearray:
        """Return the bits that are set in the request's own mask, too."""
        if self._mask is None:
            return allowed
        both = int.from_bytes(allowed, "little") & self._mask
        return bytearray(both.to_bytes(len(allowed), "little"))

    def advance(self, token_id: int) -> bool:
        """Add a sampled token; return True if it completes the answer. Raises GrammarError."""
        if token_id in self._end_ids:
            return True
        with _faults():
            self._matcher.consume_token(token_id)
            is_complete = self._matcher.is_stopped()
        self._check()
        return is_complete

    def forced(self) -> list[int]:
        """Return the next tokens if the grammar leaves one text; a hint, so no fault is raised."""
        with suppress(GrammarError), _faults():
            forced_ids: list[int] = self._matcher.compute_ff_tokens()
            return forced_ids
        return []

    def num_allowed(self, token_ids: Sequence[int]) -> int:
        """Return how many first tokens of a draft the grammar allows; a hint, too."""
        # The matcher fails for good if it sees an id that it does not know.
        known_ids = takewhile(lambda each: each < self._num_tokens, token_ids)
        with suppress(GrammarError), _faults():
            return int(self._matcher.validate_tokens(list(known_ids)))
        return 0

    def _check(self) -> None:
        if self._matcher.is_error():
            raise GrammarError(f"the grammar's matcher failed: {problem_of(self._matcher)}")


@contextmanager
def _faults() -> Iterator[None]:
    """Convert any error of the library into a GrammarError."""
    try:
        yield
    except BaseException as error:  # a Rust panic is not an Exception
        raise GrammarError(f"the grammar's matcher failed: {type(error).__name__}") from error


@dataclass(frozen=True, slots=True)
class Lark:
    """A grammar in llguidance's form of Lark."""

    text: str  # with `<[id]>` for special tokens
    trial_text: str  # without them, because a trial knows no vocabulary
    field: str  # of the request, for errors
    whitespace: str  # pattern of the whitespace in one place of JSON
    # Label and text of the schemas within it; an error ends with the label.
    parts: tuple[tuple[str, str], ...] = ()


Source = tuple[str, str] | Lark  # text of a schema and its whitespace, or a Lark grammar


def field_of(source: Source) -> str:
    return source.field if isinstance(source, Lark) else "response_format"


class GrammarCompiler:
    """A compiler of schemas to grammars over one tokenizer. Thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_bytes: int = 65_536,
        seconds: float = 5.0,
        whitespace: str = ONE_SPACE,
        *,
        num_rows: int | None = None,
    ) -> None:
        """Take the limits of a schema, and the whitespace of requests that ask for no other.

        `num_rows`: of the model's logits, behind which no token can come; None: each has a row.
        """
        self._tokenizer = tokenizer
        self._num_rows = num_rows
        self._whitespace = whitespace
        self._max_bytes = max_bytes
        self._seconds = seconds
        self._pool = ThreadPoolExecutor(_NUM_COMPILERS, "grammar")
        self._vocabulary: LLTokenizer | None = None  # by `prepare`, or at first use
        self._vocabulary_lock = threading.Lock()
        self._lock = threading.Lock()  # guards the two below; held only for short times
        # By schema and whitespace, or by Lark; the most recently used is last.
        self._kept: OrderedDict[Source, Grammar] = OrderedDict()
        self._num_waiting = 0

    def prepare(self) -> None:
        """Build the vocabulary now, unless the library rejects the tokenizer.

        It keeps the interpreter from other threads, for half a second with 50,000 tokens.
        """
        with suppress(RequestError):  # comes again with the first grammar
            self._own_vocabulary("response_format")

    def text_of(self, schema: Mapping[str, Any], field: str = "response_format") -> str:
        """Return the schema as text in the form that the grammar keeps.

        Raises RequestError, which names the request's `field`.
        """
        self.json_of(schema, field)
        return json.dumps(kept_schema(schema, field), ensure_ascii=False)

    def json_of(self, schema: Mapping[str, Any], field: str) -> str:
        """Return a schema as text. Raises RequestError if it is no JSON or has too many bytes."""
        try:
            text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
            return self.checked_size(text, field)
        except (ValueError, RecursionError) as error:
            raise refused(field, f"the schema is no JSON: {type(error).__name__}") from error

    def checked_size(self, text: str, field: str) -> str:
        """Return the text of a schema or rule. Raises RequestError if it has too many bytes."""
        try:
            num_bytes = len(text.encode())
        except UnicodeEncodeError as error:
            raise refused(field, "the schema is no JSON: it has invalid Unicode") from error
        if num_bytes > self._max_bytes:
            raise refused(
                field,
                f"the schema must be at most {self._max_bytes} bytes. Given: {num_bytes}",
            )
        return text

    @property
    def max_bytes(self) -> int:
        return self._max_bytes

    def whitespace_of(self, asked: str | None) -> str:
        return self._whitespace if asked is None else asked

    def compile(self, text: str, whitespace: str | None = None) -> Future[Grammar]:
        """Compile the text from `text_of`; the future may raise RequestError.

        `whitespace` is a checked pattern; None: the compiler's own. Raises QueueFullError if too
        many schemas wait.
        """
        return self._kept_or_compiled((text, self.whitespace_of(whitespace)))

    def compile_lark(self, lark: Lark) -> Future[Grammar]:
        """Compile a grammar whose schemas have been checked; raises as `compile` does."""
        return self._kept_or_compiled(lark)

    def _kept_or_compiled(self, key: Source) -> Future[Grammar]:
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                done: Future[Grammar] = Future()
                done.set_result(self._kept[key])
                return done
            if self._num_waiting >= _MAX_WAITING:
                raise QueueFullError(f"{_MAX_WAITING} schemas wait to be compiled; at most so many")
            self._num_waiting += 1
        compiling = self._pool.submit(self._compile, key)
        compiling.add_done_callback(self._count_done)
        return compiling

    def _count_done(self, _: Future[Grammar]) -> None:
        with self._lock:
            self._num_waiting -= 1

    def _compile(self, key: Source) -> Grammar:
        field, asked = field_of(key), dict[str, Any]()
        if isinstance(key, Lark):
            asked = {"lark": key.trial_text, "parts": key.parts, "whitespace": key.whitespace}
        else:
            asked = {"schema": key[0], "whitespace": key[1]}
        self._try(asked, field)
        vocabulary = self._own_vocabulary(field)
        matcher = matcher_of(key.text if isinstance(key, Lark) else grammar_of(*key), vocabulary)
        if problem := problem_of(matcher):
            raise refused(field, problem)
        grammar = Grammar(matcher, vocabulary.eos_token, key)
        with self._lock:
            self._kept[key] = grammar
            while len(self._kept) > _NUM_KEPT:
                self._kept.popitem(last=False)
        return grammar

    def _try(self, grammar: Mapping[str, Any], field: str) -> None:
        """Compile in a separate process with a time limit. Raises RequestError."""
        asked = {**grammar, "seconds": self._seconds, "max_bytes": _MAX_TRIAL_BYTES}
        try:
            ended = subprocess.run(  # noqa: S603  # our own file, in this interpreter
                command_of("ropewalk.model_runtime.text.grammar_trial"),
                input=json.dumps(asked).encode(),
                capture_output=True,
                timeout=self._seconds,
                check=False,
            )
        except subprocess.TimeoutExpired as error:  # `run` has killed the process
            raise refused(
                field,
                f"the schema takes longer than {self._seconds:g} seconds to compile",
            ) from error
        if ended.returncode:
            raise refused(
                field,
                f"the schema takes more than {_MAX_TRIAL_BYTES // 2**20} MiB, or more than "
                f"{self._seconds:g} seconds, to compile",
            )
        if problem := ended.stdout.decode(errors="replace"):
            raise refused(field, problem)

    def _own_vocabulary(self, field: str) -> LLTokenizer:
        """Return the library's form of the tokenizer, built once. Raises RequestError."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                try:
                    self._vocabulary = _vocabulary_of(self._tokenizer, self._num_rows)
                except Exception as error:  # the library may reject a tokenizer with any error
                    raise refused(
                        field, f"this model's tokenizer cannot be used: {error}"
                    ) from error
            return self._vocabulary


def _vocabulary_of(tokenizer: Tokenizer, num_rows: int | None = None) -> LLTokenizer:
    """Convert a tokenizer to the library's form, with an extra end token after the last id.

    The extra token is needed because the end tokens differ by request. Raises ValueError.
    """
    text, num_tokens = tokenizer.as_json()
    whole = json.loads(text)
    if num_rows is not None and num_rows < num_tokens:
        num_tokens = _keep_tokens(whole, num_rows)
    whole["added_tokens"].append(
        {
            "id": num_tokens,
            "content": "<|the end of a grammar|>",
            "special": True,
            **dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False),
        }
    )
    vocabulary = LLTokenizer(
        json.dumps(whole), eos_token=num_tokens, slices=LLTokenizer.json_slices()
    )
    if vocabulary.vocab_size != num_tokens + 1:
        raise ValueError("its ids have gaps")
    return vocabulary


def _keep_tokens(whole: dict[str, Any], num_rows: int) -> int:
    """Remove the tokens without a row from a tokenizer.json, and return the number of its ids.

    A grammar that leaves one text allows only the tokens that the tokenizer splits it into.
    """
    added = [each for each in whole["added_tokens"] if each["id"] < num_rows]
    model = whole["model"]
    kept: Any = model["vocab"]
    if isinstance(kept, list):  # Unigram's pieces are in the order of their ids
        kept = kept[:num_rows]
        ids = [len(kept) - 1]
    else:
        kept = {text: each for text, each in kept.items() if each < num_rows}
        ids = list(kept.values())
    if "merges" in model:
        begin = len(model.get("continuing_subword_prefix") or "")
        model["merges"] = [
            (first, second)
            for first, second in model["merges"]
            if first in kept and second in kept and first + second[begin:] in kept
        ]
    model["vocab"], whole["added_tokens"] = kept, added
    return max([*ids, *(each["id"] for each in added)], default=-1) + 1


def refused(field: str, problem: str) -> RequestError:
    """Return the error of a grammar that cannot be served, which names the request's field."""
    return RequestError(f"`{field}`: {problem}", param=field)
