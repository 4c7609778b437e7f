"""The chat route over a model that says a given text, for tests of what the route makes of it."""

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import httpx
import openai
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.engine.engine import Engine
from ropewalk.model_runtime.text.chat_template import ChatTemplate
from ropewalk.model_runtime.text.grammar import GrammarCompiler
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.model_runtime.text.tools.find_format import find_formats
from ropewalk.server.api.service import Service
from ropewalk.server.settings.load import load_settings
from ropewalk.server.startup.app import create_app
from ropewalk.server.startup.load_service import load_service
from tests.doubles.tokens import byte_tokenizer_fast


class Said:
    """Replaces the model runner: each prompt gets the tokens of the next text, then the end.

    The last text is repeated.
    """

    def __init__(
        self, vocab_size: int, texts: Sequence[Sequence[int]], step_seconds: float = 0
    ) -> None:
        self._vocab_size = vocab_size
        self._step_seconds = step_seconds
        self._left = [*texts]
        self._token_ids: Sequence[int] = texts[0]
        self._start: int | None = None  # the position whose logits give the first token

    is_asynchronous = False
    most_draft_rows = 0

    def table_id(self, profile: Any) -> int:
        """A table_id without a table."""
        return 0

    def check_device(self) -> None:
        """Nothing fails here."""

    def prepare(self, spans: Sequence[Span]) -> Callable[[], Tensor]:
        """Return the forward of a step."""
        return partial(self.run, spans)

    def run(self, spans: Sequence[Span]) -> Tensor:
        """Return logits that have only one likely token."""
        time.sleep(self._step_seconds)
        rows = []
        for span in spans:
            for row in span.logit_rows:
                position = span.first_position + row
                if self._start is None or len(span.token_ids) > 1:
                    self._start = position  # of another prompt
                    self._token_ids = self._left.pop(0) if len(self._left) > 1 else self._left[0]
                logits = torch.full((self._vocab_size,), -30.0)
                logits[self._token_ids[min(position - self._start, len(self._token_ids) - 1)]] = 0.0
                rows.append(logits)
        return torch.stack(rows) if rows else torch.empty(0, self._vocab_size)


@cache
def _loaded() -> Service:
    return load_service(load_settings({}))[0]


@dataclass(frozen=True)
class Scripted:
    """A server whose model says given texts."""

    service: Service
    app: Any

    def ask(self, **body: Any) -> Any:
        """The answer of openai's client."""
        return asyncio.run(self._ask(body))

    def stream(self, **body: Any) -> list[Any]:
        """The chunks of openai's client."""
        return asyncio.run(self._ask({**body, "stream": True}))

    def helped(self, **body: Any) -> list[Any]:
        """The events of the stream helper of openai's client."""
        return asyncio.run(self._ask({**body, "helped": True}))

    def post(self, path: str, body: Any) -> httpx.Response:
        """The answer to a body that no client would send."""
        return asyncio.run(self._post(path, body))

    async def _post(self, path: str, body: Any) -> httpx.Response:
        async with self.http() as http:
            text = json.dumps(body)  # httpx would refuse a lone surrogate
            return await http.post(path, content=text, headers={"Content-Type": "application/json"})

    def http(self) -> httpx.AsyncClient:
        """A client of the application, for the clients of APIs."""
        transport = httpx.ASGITransport(app=self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://scripted")

    async def _ask(self, body: dict[str, Any]) -> Any:
        given = {"model": "ropewalk-demo", "max_tokens": 400, "temperature": 0, **body}
        given.setdefault("messages", [{"role": "user", "content": "Hi."}])
        client = openai.AsyncOpenAI(
            base_url="http://scripted/v1", api_key="none", max_retries=0, http_client=self.http()
        )
        async with client:
            if given.pop("helped", False):
                async with client.chat.completions.stream(**given) as running:
                    return [event async for event in running]
            found = await client.chat.completions.create(**given)
            return [chunk async for chunk in found] if given.get("stream") else found


@contextmanager
def saying(
    text: str | Sequence[str],
    template: str | None = None,
    special: Sequence[str] = (),
    *,
    named: Mapping[str, str] | None = None,
    step_seconds: float = 0,
    config: Mapping[str, Any] | None = None,
    **changes: Any,
) -> Iterator[Scripted]:
    """A server whose model says a text, or one text after the other.

    `special`: special tokens of its byte tokenizer. `named`: its templates beside `template`.
    `step_seconds`: the time of a step. `config`: fields of the engine's. `changes`: settings.
    """
    fast = byte_tokenizer_fast()
    fast.add_special_tokens({"eos_token": "<|end|>", "additional_special_tokens": [*special]})
    tokenizer = Tokenizer(fast)
    service = _loaded()
    chat_template = ChatTemplate(template, fast.special_tokens_map, others=named)
    vocab_size = len(fast)
    texts = [text] if isinstance(text, str) else text
    said = [[*tokenizer.encode(each), fast.eos_token_id] for each in texts]
    settings = service.settings.model_copy(update=changes)
    engine = Engine(
        Said(vocab_size, said, step_seconds),
        tokenizer,
        replace(service.engine.config, **(config or {})),
        frozenset([fast.eos_token_id]),
        service.metrics,
    )
    made = replace(
        service,
        settings=settings,
        engine=engine,
        tokenizer=tokenizer,
        vocab_size=vocab_size,
        chat_template=chat_template,
        chat_formats=find_formats(chat_template, tokenizer.special_ids, settings.tool_format),
        grammars=GrammarCompiler(tokenizer),
    )
    engine.start(lambda: None, made.output_queue.flush)
    try:
        yield Scripted(made, create_app(made))
    finally:
        engine.stop()
