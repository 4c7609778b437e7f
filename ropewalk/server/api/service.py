"""The engine behind the routes: served names, limits, and the way of a request into the engine.

A route reserves the request's places in the queue, tokenises, and submits:

    async with service.reserve(body) as reservation:
        prompts = ...
        submission = reservation.submit(prompts)
"""

import asyncio
import hashlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.errors import (
    RequestError,
    RequestTimeoutError,
    RopewalkError,
    UnknownModelError,
)
from ropewalk.model_runtime.runner.bad_words import spellings
from ropewalk.model_runtime.runner.token_mask import token_mask
from ropewalk.model_runtime.text.chat_template import ChatTemplate
from ropewalk.model_runtime.text.grammar import Grammar, GrammarCompiler, Lark
from ropewalk.model_runtime.text.text_rules import grammar_of_rule
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.model_runtime.text.tools.find_format import ChatFormats
from ropewalk.rope import NativeRope
from ropewalk.server.access.key_ring import KeyRing
from ropewalk.server.access.open_request import admitted, current_request
from ropewalk.server.api.generation_schema import GenerationRequest, check_limits, unknown_token
from ropewalk.server.api.output_queue import OutputQueue
from ropewalk.server.api.reservation import Reservation
from ropewalk.server.api.structured_schema import AskedAnswer
from ropewalk.server.api.turn_request import in_words_of
from ropewalk.server.errors import rejection_reason
from ropewalk.server.metrics import Metrics
from ropewalk.server.middleware.http_metrics import HttpMetrics
from ropewalk.server.middleware.large_bodies import LARGE
from ropewalk.server.settings.load import ServeSettings

_FINGERPRINT_DIGITS = 32  # hexadecimal
# Tokens, where no context is longer. Python's list of so many takes 30 ms of the interpreter.
_PIECE = 16384  # tokens; looking at them takes less than a millisecond
_LONGEST_TEXT = 2**20

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The two hashes by which a router tells servers that give the same bytes.

    Servers with another `model` part serve something else: other weights, number types, settings,
    or a version whose sources differ. Servers with another `arithmetic` part serve the same on
    another processor or with other libraries, so the last bits may differ. It is made at the end of
    the load, and only with a `router_key`.
    """

    model: str  # of all served names
    arithmetic: str

    def of_name(self, deployment: object) -> str:
        """Return the part `model` of one served name, whose `repr` tells how it is scaled."""
        found = hashlib.sha256(f"{self.model} {deployment!r}".encode()).hexdigest()
        return found[:_FINGERPRINT_DIGITS]


@dataclass(frozen=True, slots=True)
class Service:
    """One engine behind one or more served names."""

    settings: ServeSettings
    engine: Engine
    tokenizer: Tokenizer
    native: NativeRope  # the model's own, for deployments that come later
    deployments: dict[str, Deployment]  # the first serves requests that name no model
    aliases: dict[str, str]  # other names of them, which answers do not tell
    metrics: Metrics
    http_metrics: HttpMetrics
    vocab_size: int
    sampling_defaults: Mapping[str, float]  # for fields that a request leaves out
    max_len: int  # positions of the longest sequence of any deployment
    cache_bytes: Mapping[str, int]  # of the KV cache, by part
    chat_template: ChatTemplate
    chat_formats: ChatFormats
    grammars: GrammarCompiler
    has_same_bits: bool  # whether an answer has them in any batch
    max_new_tokens: int | None = None  # of every answer; None: any number
    is_on_gpu: bool = False  # where no rotation table finds room that was not made at start
    key_ring: KeyRing | None = None  # None: no key is asked for
    fingerprint: Fingerprint | None = None  # None: no router is trusted
    output_queue: OutputQueue = field(default_factory=OutputQueue)  # flushed after each step
    # Half of the cores: the tokenizer computes in them without the interpreter.
    long_texts: ThreadPoolExecutor = field(
        default_factory=lambda: ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 2), "long-texts")
    )
    created: int = field(default_factory=lambda: int(time.time()))

    def deployment(self, name: str | None) -> Deployment:
        """Return the deployment of that name. Raises UnknownModelError."""
        if name is None:
            return next(iter(self.deployments.values()))
        name = self.aliases.get(name, name)
        if name not in self.deployments:
            served = ", ".join((*self.deployments, *self.aliases))
            raise UnknownModelError(
                f"The model {name[:64]!a} does not exist. Served: {served}.", param="model"
            )
        return self.deployments[name]

    def aliases_of(self, name: str) -> list[str]:
        return [alias for alias, served in self.aliases.items() if served == name]

    def replace_deployments(
        self, deployments: Mapping[str, Deployment], aliases: Mapping[str, str]
    ) -> None:
        """Serve other deployments and aliases from now on; call it on the event loop."""
        self.deployments.clear()
        self.deployments.update(deployments)
        self.aliases.clear()
        self.aliases.update(aliases)

    @asynccontextmanager
    async def reserve(
        self, body: GenerationRequest, extra_stop: Sequence[str] = ()
    ) -> AsyncIterator[Reservation]:
        """Check a request and reserve its places in the queue, before it is tokenised.

        `extra_stop` are the stop strings of the chat template. The time of the request bounds the
        block, which ends with RequestTimeoutError. Raises RequestError, QueueFullError,
        KeyLimitError or EngineStoppedError. An error inside the block counts as a rejection, too.
        """
        arrived = time.monotonic()
        with self._rejections_counted(body):
            deployment = self.deployment(body.model)
            opened = current_request()
            if opened is not None:
                opened.deployment = deployment.name
            sampling = body.sampling(self.sampling_defaults, extra_stop)
            check_limits(body, self.settings, self.vocab_size)
            if body.allowed_token_ids:
                sampling = replace(sampling, allowed=token_mask(body.allowed_token_ids))
            num = body.num_prompts * body.num_answers
            async with self._in_time(body):
                with admitted(num), self.engine.reserve(num) as places:
                    if body.bad_words:
                        words = await asyncio.to_thread(self._word_ids, body.bad_words)
                        sampling = replace(sampling, bad_words=words)
                    yield Reservation(self, body, deployment, sampling, places, arrived)

    @asynccontextmanager
    async def _in_time(self, body: GenerationRequest) -> AsyncIterator[None]:
        """End the block when the time of a request is over. Raises RequestTimeoutError."""
        timeout = asyncio.timeout(self.time_limit(body))
        try:
            async with timeout:
                yield
        except TimeoutError as error:
            if not timeout.expired():
                raise
            raise self.out_of_time(body) from error

    def time_limit(self, body: GenerationRequest) -> float | None:
        """Return the seconds that a request may take; None: no bound."""
        return self.settings.max_request_seconds if body.max_time is None else body.max_time

    def out_of_time(self, body: GenerationRequest) -> RequestTimeoutError:
        """Build the error of a request whose time was over before its first token."""
        name = "max_request_seconds" if body.max_time is None else "max_time"
        return RequestTimeoutError(
            f"The request had no token within {self.time_limit(body):g} seconds ({name}).",
            param=None if body.max_time is None else name,
        )

    async def tokenize(
        self, text: str, *, add_special_tokens: bool = True, param: str = "prompt"
    ) -> tuple[int, ...]:
        """Tokenise a text off the event loop, because a long one takes a while.

        A text that is too long for any tokens is refused first. Raises RequestError, which names
        the request's field `param`.
        """
        self.check_length(len(text), param)
        encode = partial(
            self.tokenizer.encode_at_most,
            text,
            self.longest_text,
            add_special_tokens=add_special_tokens,
            param=param,
        )
        token_ids = await self._in_thread(len(text), encode)
        if token_ids is None:
            told = f"`{param}` must be at most {self.longest_text} tokens. Given: more"
            raise RequestError(told, param=param, code="context_length_exceeded")
        return token_ids

    async def text_of(self, token_ids: list[int], param: str, *, skip_special_tokens: bool) -> str:
        """Return the text of tokens, off the event loop. Raises RequestError for an unknown one."""

        def decoded() -> str:
            for start in range(0, len(token_ids), _PIECE):
                self.check_token_id(max(token_ids[start : start + _PIECE]), param)
            return self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)

        return await self._in_thread(len(token_ids), decoded)

    async def _in_thread(self, size: int, call: Callable[[], Result]) -> Result:
        """Call in a thread; those of long texts are apart, so that short ones find a free one."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self.long_texts if size > LARGE else None, call)

    @property
    def longest_text(self) -> int:
        """Return the most tokens of a text that is tokenised, or of tokens that become a text."""
        return max(self.max_len, _LONGEST_TEXT)

    def _word_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of each word at the start of a text and after a space.

        A word with a token that the model has no row for is left out: it cannot come.
        """
        spelt = (each for word in words for each in spellings(word))
        encode = partial(self.tokenizer.encode, add_special_tokens=False, param="bad_words")
        found = dict.fromkeys(tuple(encode(each)) for each in spelt)
        return tuple(ids for ids in found if ids and max(ids) < self.vocab_size)

    def check_length(self, num_characters: int, param: str) -> None:
        """Refuse a text that must be too long before it is tokenised. Raises RequestError."""
        limit = self.max_len * self.tokenizer.longest_token
        why = f"{self.max_len} tokens of at most {self.tokenizer.longest_token}"
        if num_characters > limit:
            raise RequestError(
                f"`{param}` must be at most {limit} characters ({why}). Given: {num_characters}",
                param=param,
                code="context_length_exceeded",
            )

    def check_token_id(self, token_id: int, param: str) -> None:
        """Refuse an id outside the vocabulary. Raises RequestError."""
        if token_id >= self.vocab_size:
            raise unknown_token(token_id, param, self.vocab_size)

    async def grammar(self, asked: AskedAnswer | None, whitespace: str | None) -> Grammar | None:
        """Compile the grammar of an answer off the event loop; None if any text is valid.

        Raises RequestError, which names the field that asks, or QueueFullError.
        """
        if asked is None:
            return None
        if asked.rule is not None:
            text = grammar_of_rule(self.grammars.checked_size(asked.rule, asked.field))
            lark = Lark(text, text, asked.field, self.grammars.whitespace_of(whitespace))
            return await asyncio.wrap_future(self.grammars.compile_lark(lark))
        with in_words_of({"response_format": asked.field}):
            text = await asyncio.to_thread(self.grammars.text_of, asked.schema or {})
            return await asyncio.wrap_future(self.grammars.compile(text, whitespace))

    @contextmanager
    def _rejections_counted(self, body: GenerationRequest) -> Iterator[None]:
        """Count an error of the block in the metrics."""
        try:
            yield
        except RopewalkError as error:
            self.metrics.rejected(rejection_reason(error))
            if isinstance(error, RequestError):
                error.param = body.own_name(error.param)
            raise
