"""The measured server: its models, and prompts that it can read."""

import random
import re
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import httpx
from pydantic import BaseModel, ValidationError

from ropewalk.studies.bench.plan import BenchError

_NUM_FRESH = 8  # tokens; enough for different beginnings in any two runs
_NO_SUCH_ROUTE = (404, 405)
_MAX_MESSAGE = 300  # characters of a server's message that are shown

# The counter of this server, or the one of vLLM.
_DRAFTED = re.compile(
    r"^(?:ropewalk_draft_tokens_accepted_total|vllm:spec_decode_num_accepted_tokens_total)"
    r"(?:\{.*\})? ([\d.e+]+)$",
    re.MULTILINE,
)

_TEXT = """
the yard behind the harbour is longer than any street in town and when the wind comes from
the west you can hear the wheel turn from one end to the other every morning three people walk
backwards with hemp around their waist they spin as they go and a boy carries water along the
whole line nobody runs because a strand that was pulled too fast will break in winter far out
"""
_WORDS = _TEXT.split()
_SAMPLE = _TEXT + string.ascii_letters + string.digits + string.punctuation


class _ModelCard(BaseModel):
    id: str
    max_model_len: int | None = None  # in tokens; OpenAI's own list has no such field


class _ModelList(BaseModel):
    data: list[_ModelCard]


class _Tokens(BaseModel):
    tokens: list[int] = []


class _PromptUsage(BaseModel):
    prompt_tokens: int


class _Counted(BaseModel):
    usage: _PromptUsage


Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Target:
    """A served model and its address."""

    url: str  # without /v1 and without a slash at the end
    model: str
    max_model_len: int | None  # tokens; None: the server does not say


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; `num_tokens` is None if only the server can count them."""

    content: list[int] | str
    num_tokens: int | None


class PromptMaker(Protocol):
    """A maker of prompts, by context length in tokens and a request's number within it."""

    kind: str  # "token ids" or "words"

    def __call__(self, context_len: int, number: int) -> Prompt:
        """Return the prompt; it is equal for equal seeds except for its beginning, always new."""


class IdPrompts:
    """Random sequences of token ids with exactly the requested length."""

    kind = "token ids"

    def __init__(self, token_ids: Sequence[int], seed: int) -> None:
        self._token_ids = sorted(set(token_ids))
        self._seed = seed

    def __call__(self, context_len: int, number: int) -> Prompt:
        """See PromptMaker."""
        seeded = random.Random(f"{self._seed}/{context_len}/{number}")  # noqa: S311  # no secrets
        num_fresh = min(_NUM_FRESH, context_len)
        # Otherwise a second run against the same server would find its prompts in the cache.
        ids = random.SystemRandom().choices(self._token_ids, k=num_fresh)
        ids += seeded.choices(self._token_ids, k=context_len - num_fresh)
        return Prompt(ids, context_len)


class WordPrompts:
    """Random words with about the requested tokens; the server's usage has the exact count."""

    kind = "words"

    def __init__(self, tokens_per_word: float, seed: int) -> None:
        self._tokens_per_word = tokens_per_word
        self._seed = seed

    def __call__(self, context_len: int, number: int) -> Prompt:
        """See PromptMaker. Words are equally frequent, so lengths vary by only a few tokens."""
        seeded = random.Random(f"{self._seed}/{context_len}/{number}")  # noqa: S311  # no secrets
        num_words = max(1, int((context_len - _NUM_FRESH) / self._tokens_per_word))
        words = random.SystemRandom().sample(_WORDS, len(_WORDS))
        while len(words) < num_words:
            words += seeded.sample(_WORDS, len(_WORDS))
        return Prompt(" ".join(words[:num_words]), None)


async def read_drafted(client: httpx.AsyncClient, target: Target) -> int | None:
    """Return the tokens of drafts that the server has accepted since its start.

    None: its /metrics do not say, or are not open to this client.
    """
    try:
        answer = await client.get(f"{target.url}/metrics")
    except httpx.HTTPError:
        return None
    found = _DRAFTED.findall(answer.text) if answer.status_code == httpx.codes.OK else []
    return round(sum(map(float, found))) if found else None


def check_url(url: str) -> None:
    """Raise BenchError if a URL is not one of a server."""
    if not url.lower().startswith(("http://", "https://")):
        raise BenchError(f"the URL needs http:// or https:// in front, got {url}")


def root_of(url: str) -> str:
    """Return the root of a URL: `http://host:8000/v1/` becomes `http://host:8000`."""
    return url.rstrip("/").removesuffix("/v1").rstrip("/")


async def find_target(client: httpx.AsyncClient, url: str, model: str | None) -> Target:
    """Return the served model of that name, or the first. Raises BenchError."""
    root = root_of(url)
    answer = await _ask(lambda: client.get(f"{root}/v1/models"), f"{root}/v1/models")
    served = _read(answer, _ModelList).data
    if not served:
        raise BenchError(f"{root} serves no model")
    for card in served:
        if model in (None, card.id):
            return Target(root, card.id, card.max_model_len)
    names = ", ".join(card.id for card in served)
    raise BenchError(f"--model must be a served name ({names}), got {model!r}")


async def find_prompts(client: httpx.AsyncClient, target: Target, seed: int) -> PromptMaker:
    """Return prompts of token ids if the server has POST /tokenize, otherwise of words.

    The ids are those of a text, so they contain no special or unknown tokens. Raises BenchError.
    """
    url = f"{target.url}/tokenize"
    body: dict[str, Any] = {"model": target.model, "prompt": _SAMPLE, "add_special_tokens": False}
    answer = await _ask(lambda: client.post(url, json=body), url)
    if answer.status_code not in _NO_SUCH_ROUTE:
        token_ids = _read(answer, _Tokens).tokens
        if token_ids:
            return IdPrompts(token_ids, seed)
    url = f"{target.url}/v1/completions"
    body = {"model": target.model, "prompt": " ".join(_WORDS), "max_tokens": 1, "temperature": 0}
    answer = await _ask(lambda: client.post(url, json=body), url)
    return WordPrompts(_read(answer, _Counted).usage.prompt_tokens / len(_WORDS), seed)


async def _ask(send: Callable[[], Any], url: str) -> httpx.Response:
    try:
        answer: httpx.Response = await send()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise BenchError(f"cannot reach {url}: {str(error) or type(error).__name__}") from error
    return answer


def _read(answer: httpx.Response, shape: type[Body]) -> Body:
    """Parse the body of an answer with status 200. Raises BenchError."""
    if answer.status_code != httpx.codes.OK:
        said = answer.text[:_MAX_MESSAGE]
        raise BenchError(f"{answer.url} answered with status {answer.status_code}: {said}")
    try:
        return shape.model_validate_json(answer.content)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in problem["loc"]) or "the body"
        raise BenchError(
            f"{answer.url} answered what is not OpenAI's: {field}: {problem['msg']}"
        ) from error
