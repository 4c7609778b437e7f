"""Transformers' `generate` behind the yardstick's routes."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
import torch
import uvicorn
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.transformers_server import Generating, create_app, load
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL

pytestmark = pytest.mark.costly(by="file")

PROMPT = [0, *range(100, 120)]


@contextmanager
def _served(generating: Generating) -> Iterator[str]:
    """The server on a free port, in a thread of this process."""
    server = uvicorn.Server(
        uvicorn.Config(create_app(generating, "demo"), port=0, log_level="critical")
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        (socket,) = server.servers[0].sockets
        yield f"http://127.0.0.1:{socket.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The URL of a server of the embedded model."""
    with _served(load(str(EMBEDDED_MODEL), "float32")) as found:
        yield found


def body(**fields: Any) -> dict[str, Any]:
    """The yardstick's request."""
    return {
        "model": "demo",
        "prompt": PROMPT,
        "max_tokens": 12,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        **fields,
    }


def test_it_streams_what_generate_says(url: str) -> None:
    """The server sends each token as an event, and then the counts."""
    lines = httpx.post(f"{url}/v1/completions", json=body()).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    assert events[-1]["usage"] == {"prompt_tokens": len(PROMPT), "completion_tokens": 12}
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    found = model.generate(
        ids, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    texts = [tokenizer.decode([token]) for token in found[0, len(PROMPT) :].tolist()]
    assert [event["choices"][0]["text"] for event in events[:-1]] == texts


@pytest.mark.parametrize("field", [{"temperature": 0.5}, {"ignore_eos": False}, {"n": 2}])
def test_fields_that_it_cannot_serve_are_refused(url: str, field: dict[str, Any]) -> None:
    """A server that ignored a field would be compared all the same."""
    answer = httpx.post(f"{url}/v1/completions", json=body(**field))
    assert answer.status_code == 422
    assert next(iter(field)) in answer.text


@pytest.mark.alone
def test_a_generation_whose_client_went_away_ends(url: str) -> None:
    """The request after a lost client does not wait for a thousand tokens."""
    with httpx.stream("POST", f"{url}/v1/completions", json=body(max_tokens=1900)) as answer:
        next(answer.iter_bytes())
    began = time.perf_counter()
    httpx.post(f"{url}/v1/completions", json=body(max_tokens=1), timeout=60)
    assert time.perf_counter() - began < 3  # all of them take ten or more
