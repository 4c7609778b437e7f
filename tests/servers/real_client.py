"""Requests to a server of a real checkpoint, and what they are made of."""

from pydoc_data.topics import topics
from typing import Any

import httpx
import torch

from tests.servers.processes import Server

TEXT = "\n".join(topics.values())  # Python's language reference, in English
SHORT_LEN = 1024  # the trained length that the deployment `short` states
YARN = {"rope_type": "yarn", "factor": 2.0}
PROMPT = "Python has several built-in data types. Its most important ones are"
# As transformers continues the prompt. The long tests compare these texts with it.
CONTINUED = {
    "smollm2": ":\n\n- `int` (integer)\n- `float` (floating point)\n- `bool`",
    "gemma3": " int, float, bool, and str.\n\nThe most important data types are:\n\n"
    "* int: numbers between ",
}


def complete(server: Server, **fields: Any) -> dict[str, Any]:
    """Return the body of a greedy completion by the deployment `whole`, or by a named one."""
    body = {"model": "whole", "temperature": 0, **fields}
    answered = httpx.post(f"{server.url}/v1/completions", json=body, timeout=500)
    answered.raise_for_status()
    found: dict[str, Any] = answered.json()
    return found


def text_of(answer: dict[str, Any]) -> str:
    """Return the text of an answer's only choice."""
    found: str = answer["choices"][0]["text"]
    return found


def rope_of(answer: dict[str, Any]) -> tuple[str, float]:
    """Return the method and the factor that an answer reports."""
    rope = answer["choices"][0]["rope"]
    return rope["rope_type"], rope["factor"]


def echoed(answer: dict[str, Any], num_tokens: int) -> torch.Tensor:
    """Return the logprobs of the prompt's tokens but the first."""
    logprobs = answer["choices"][0]["logprobs"]["token_logprobs"]
    return torch.tensor(logprobs[1:num_tokens])
