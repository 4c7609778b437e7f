"""A prompt as the choice of a server sees it, made from the text of a body.

The router has no tokenizer and no template. It cuts the text in chunks of equal length, so requests
whose texts begin alike have the same first keys. Servers look their pages up by tokens, so a wrong
guess costs time only. Several characters stand for a token, whatever the language; the choice
compares costs with each other.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

from ropewalk.server.replicas.text_chunks import MOST_CHUNKS, TextChunks

CHUNK_TOKENS = 32
_CHARS_OF_A_TOKEN = 4
_CHUNK_CHARS = CHUNK_TOKENS * _CHARS_OF_A_TOKEN
# Templates write these before the conversation, wherever the body has them.
_FIRST = ("tools", "documents", "system", "instructions")
_THEN = ("messages", "input", "prompt")
# Cached pages are shared between requests that agree on these.
_OF_THE_CACHE = ("model", "cache_salt", "rope")
_MOST_BYTES, _MOST_LISTS = 1 << 21, 1 << 16  # parsing them takes some 20 ms and MB
NO_CHUNKS = TextChunks(0, CHUNK_TOKENS, ())


def chunks_of(body: bytes, owner: bytes) -> TextChunks:
    """Return the length and the keys of a body's prompt; none if it is not JSON with a prompt.

    A body of more than 2 MiB, or with very many lists or objects, is not parsed and has no keys,
    because its sender's API key is not checked yet.

    owner: whose cached pages the request may use, from the client's key.
    """
    if len(body) > _MOST_BYTES:
        return TextChunks(len(body) // _CHARS_OF_A_TOKEN, CHUNK_TOKENS, ())
    if body.count(b"[") + body.count(b"{") > _MOST_LISTS:
        return NO_CHUNKS
    try:
        found = json.loads(body) if body else None
        return _chunks_of(found, owner) if isinstance(found, dict) else NO_CHUNKS
    except (ValueError, RecursionError):
        return NO_CHUNKS


def _chunks_of(found: dict[str, Any], owner: bytes) -> TextChunks:
    root = json.dumps([found.get(name) for name in _OF_THE_CACHE], sort_keys=True).encode()
    chunks, num_tokens = _chunks(found)
    keys = []
    key = hashlib.sha256(owner + b"\0" + root).digest()
    for chunk in chunks:
        key = hashlib.sha256(key + chunk).digest()
        keys.append(key)
    return TextChunks(
        num_tokens, CHUNK_TOKENS, tuple(keys), is_scored=found.get("prompt_logprobs") is not None
    )


def _chunks(body: dict[str, Any]) -> tuple[Iterator[bytes], int]:
    """Return the chunks of a prompt, and the prompt's length in tokens."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        prompt = prompt[0]  # the first of several
    if isinstance(prompt, list):
        return _cut(prompt, CHUNK_TOKENS), len(prompt)
    text = "".join(_text(body[name]) for name in _FIRST if body.get(name))
    text += prompt if isinstance(prompt, str) else ""
    text += "".join(_text(body[name]) for name in _THEN if name != "prompt" and body.get(name))
    return _cut(text, _CHUNK_CHARS), -(-len(text) // _CHARS_OF_A_TOKEN)


def _text(value: Any) -> str:
    """Return a value as a text that begins like that of each longer list with the same items."""
    if isinstance(value, list):
        return "".join(json.dumps(each, sort_keys=True, ensure_ascii=False) for each in value)
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)


def _cut(prompt: str | Sequence[Any], num: int) -> Iterator[bytes]:
    """Yield the full chunks of a text, or of a list of tokens."""
    for start in range(0, min(len(prompt) // num, MOST_CHUNKS) * num, num):
        chunk = prompt[start : start + num]
        if isinstance(chunk, str):
            yield chunk.encode("utf-8", "surrogatepass")
        else:
            yield json.dumps(chunk).encode()
