"""`python -m benchmarks.peers.transformers_server MODEL`: `generate` as a server.

It answers streamed greedy completions of token ids, one request at a time in order of arrival,
because `generate` has no scheduler. It refuses all other requests.
"""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any, Literal

import click
import torch
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class _StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: bool


class _Body(BaseModel):
    """The fields that the client sends; all others are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)
    model: str
    prompt: list[int] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    temperature: Literal[0]
    ignore_eos: Literal[True]
    stream: Literal[True]
    stream_options: _StreamOptions


class _ClientGoneError(Exception):
    """A signal that ends a generation whose client has disconnected."""


class _Tokens(BaseStreamer):  # type: ignore[misc]  # untyped
    """A queue of tokens from `generate`'s thread to the event loop; None is the end."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._has_prompt = False
        self.queue: asyncio.Queue[int | None] = asyncio.Queue()
        self.is_read = True

    def put(self, value: torch.Tensor) -> None:
        """Queue a token. `generate` calls this first with the prompt, then with each token."""
        if not self.is_read:
            raise _ClientGoneError
        if not self._has_prompt:
            self._has_prompt = True
            return
        self._loop.call_soon_threadsafe(self.queue.put_nowait, int(value.item()))

    def end(self) -> None:
        """Queue the end. `generate` calls this after the last token."""
        self._loop.call_soon_threadsafe(self.queue.put_nowait, None)


class Generating:
    """One model, which answers requests in order of arrival."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any) -> None:
        self._model = model
        self._model.generation_config.eos_token_id = None  # because all requests set ignore_eos
        self._model.generation_config.pad_token_id = 0  # never used, because nothing is padded
        self._tokenizer = tokenizer
        self._turn = asyncio.Lock()

    @property
    def max_model_len(self) -> int:
        return int(self._model.config.max_position_embeddings)

    async def texts(self, prompt: list[int], num_output: int) -> AsyncGenerator[str, None]:
        """Yield the text of each token as it comes."""
        async with self._turn:
            tokens = _Tokens()
            running = asyncio.create_task(
                asyncio.to_thread(self._generate, prompt, num_output, tokens)
            )
            try:
                while (token := await tokens.queue.get()) is not None:
                    yield self._tokenizer.decode([token])
            finally:
                tokens.is_read = False
                await running

    def _generate(self, prompt: list[int], num_output: int, tokens: _Tokens) -> None:
        ids = torch.tensor([prompt])
        try:
            with torch.inference_mode():
                self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    max_new_tokens=num_output,
                    do_sample=False,
                    streamer=tokens,
                )
        except _ClientGoneError:
            return
        except BaseException:
            tokens.end()
            raise


def create_app(generating: Generating, name: str) -> FastAPI:
    """Create an app with the two routes that the client uses."""
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        card = {"id": name, "object": "model", "max_model_len": generating.max_model_len}
        return {"object": "list", "data": [card]}

    @app.post("/v1/completions")
    async def completions(body: _Body) -> StreamingResponse:
        return StreamingResponse(_events(generating, body), media_type="text/event-stream")

    return app


async def _events(generating: Generating, body: _Body) -> AsyncIterator[str]:
    num_output = 0
    async with aclosing(generating.texts(body.prompt, body.max_tokens)) as texts:
        async for text in texts:
            num_output += 1
            yield _event({"choices": [{"index": 0, "text": text}]})
    if body.stream_options.include_usage:
        usage = {"prompt_tokens": len(body.prompt), "completion_tokens": num_output}
        yield _event({"choices": [], "usage": usage})
    yield "data: [DONE]\n\n"


def _event(fields: dict[str, Any]) -> str:
    return f"data: {json.dumps(fields)}\n\n"


def load(folder: str, dtype: str) -> Generating:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=_DTYPES[dtype]).eval()
    return Generating(model, AutoTokenizer.from_pretrained(folder))


@click.command()
@click.argument("model")
@click.option(
    "--dtype",
    type=click.Choice(list(_DTYPES)),
    default="float32",
    show_default=True,
    help="Number type of weights and cache.",
)
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--port", type=click.IntRange(min=1), default=8000, show_default=True)
def main(model: str, dtype: str, threads: int, port: int) -> None:
    """Serve MODEL, a folder or a hub id, on this machine only."""
    torch.set_num_threads(threads)
    app = create_app(load(model, dtype), Path(model).name)
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="info")


if __name__ == "__main__":
    main()
