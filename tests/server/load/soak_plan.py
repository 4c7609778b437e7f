"""The requests of a soak: a mixture of everything, from a seed, a client's number and a count."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, Literal

Manner = Literal["whole", "stream", "leave whole", "leave stream", "hostile"]

MAX_LEN = 2048
_L = 256  # the embedded model's native length
_METHODS = ("default", "linear", "ntk", "dynamic", "yarn", "llama3")
_POLICIES = ("by_position", "grow", "grow-exact", "fixed")
_WORDS = ("rope", "walk", "hemp", "strand", "twist", "yarn", "length", "the", "of", "a", "tar")
# Refused before anything is computed; every one is counted by its reason.
_HOSTILE = (
    *(b"", b"{", b"[]", b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "x": 1}'),
    *(b'{"prompt": "a", "max_tokens": "5"}', b'{"prompt": [7777]}', b'{"prompt": "\\ud800"}'),
    *(b'{"prompt": "a", "model": "another"}', b'{"prompt": "a", "max_tokens": 9000}'),
    *(json.dumps({"prompt": [7] * 3000}).encode(), b'{"prompt": "' + b"a" * 300_000 + b'"}'),
    *(b'{"prompt": "a", "rope": {"factor": 99}}', b'{"prompt": ["a"], "n": 17}', b"\x00"),
    b'{"prompt": %b, "n": 16}' % json.dumps(["a"] * 64).encode(),  # more than is ever held
)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request, and how its client behaves."""

    manner: Manner
    path: str
    body: bytes
    num_choices: int = 1
    most_tokens: int = 0  # prompt tokens and max_tokens of all choices together, at most
    is_greedy: bool = False
    leave_after_s: float = 0.0
    leave_after_events: int = 0


def ask(seed: int, client: int, count: int, *, may_leave: bool) -> Ask:
    """The request of that client and number: the same for the same seed."""
    rng = Random(f"{seed}/{client}/{count}")
    if rng.random() < 0.08:
        return Ask("hostile", "/v1/completions", rng.choice(_HOSTILE))
    manner: Manner = "stream" if rng.random() < 0.5 else "whole"
    if may_leave and rng.random() < 0.2:
        manner = "leave stream" if manner == "stream" else "leave whole"
    # The answer to a client that leaves early stays unknown, and is counted as one.
    num_choices = 1 if manner == "leave whole" else rng.choice([1, 1, 1, 1, 2, 3, 5])
    fields, num_prompt, max_tokens = _lengths(rng, num_choices)
    is_greedy = rng.random() < 0.5
    fields |= {"n": num_choices, "temperature": 0} if is_greedy else {"n": num_choices}
    if not is_greedy:
        fields |= {"temperature": rng.choice([0.7, 1, 2]), "top_p": 0.9, "seed": count}
    if manner.endswith("stream"):
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    fields |= _rope(rng, num_prompt + max_tokens - 1)
    return Ask(
        manner,
        "/v1/chat/completions" if "messages" in fields else "/v1/completions",
        json.dumps(fields).encode(),
        num_choices,
        num_choices * (num_prompt + max_tokens),
        is_greedy,
        rng.uniform(0.001, 0.4),
        rng.randrange(1, 8),
    )


def _lengths(rng: Random, num_choices: int) -> tuple[dict[str, Any], int, int]:
    """(prompt and max_tokens, prompt tokens at most, max_tokens), over all tiers."""
    max_tokens = rng.choice([1, 2, 4, 8, 16, 40])
    if rng.random() < 0.2:
        content = " ".join(rng.choices(_WORDS, k=rng.choice([3, 20, 60])))
        messages = [{"role": "user", "content": content}]
        return {"messages": messages, "max_tokens": max_tokens}, 4 * len(content), max_tokens
    num_prompt = rng.choice([10, 30, 100, 200, 250, 300, 500, 600, 1000, 1300, 2000, 2040])
    if num_prompt > 600 and rng.random() < 0.7:  # long ones are rarer, or little else runs
        num_prompt = rng.choice([10, 30, 100, 200, 250])
    if num_prompt == 250 and rng.random() < 0.5:
        max_tokens = 60  # over a tier's end
    if rng.random() < 0.05 and num_choices == 1:
        max_tokens = 300
    max_tokens = min(max_tokens, MAX_LEN - num_prompt + 1)
    # Some prompts begin alike, and find each other in the prefix cache.
    shared = Random(rng.randrange(6))
    ids = [shared.randrange(5, 2000) for _ in range(num_prompt - 5)]
    ids += [rng.randrange(5, 2000) for _ in range(5)]
    fields: dict[str, Any] = {"prompt": ids, "max_tokens": max_tokens}
    if rng.random() < 0.7:
        fields["ignore_eos"] = True
    if rng.random() < 0.2:
        fields["stop"] = rng.choice(["e", [" ", "a"], "\n"])
    if rng.random() < 0.1:
        fields["logprobs"] = rng.choice([0, 5])
    return fields, num_prompt, max_tokens


def _rope(rng: Random, num_positions: int) -> Mapping[str, Any]:
    """Any method and policy that the embedded model can have, or nothing."""
    if rng.random() < 0.3:
        return {}
    method = rng.choice(_METHODS)
    wanted: dict[str, Any] = {"rope_type": method, "policy": rng.choice(_POLICIES)}
    if method != "default" and rng.random() < 0.3:
        # A factor that does not cover the request refuses it.
        wanted["factor"] = rng.choice(
            [factor for factor in (1, 2, 3, 8) if factor * _L >= num_positions]
        )
    return {"rope": wanted}
