"""HTTP requests of the terminal's clients, and the server's errors as sentences."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx

_CONNECT_S = 10.0


class ClientError(Exception):
    """A request failed; its message is a sentence for the user."""


@dataclass(slots=True)
class StreamedAnswer:
    """An answer while it is streamed, with its times in seconds."""

    text: str = ""
    rope: dict[str, Any] = field(default_factory=dict)
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str | None = None
    first_s: float | None = None  # from sending to the first text
    last_s: float | None = None  # to the last text

    def cut(self) -> str:
        """Return why an answer without a limit of its own was cut, or "" if it was not."""
        ended_by = self.rope.get("ended_by")
        return f"ended by {ended_by}" if ended_by else ""

    def summary(self) -> str:
        """Return one line: tokens, tier, time to the first token, time per token, a cut."""
        num_prompt = self.usage.get("prompt_tokens", 0)
        num_generated = self.usage.get("completion_tokens", 0)
        parts = [f"{num_prompt:,} + {num_generated:,} tokens"]
        if self.rope:
            positions = self.rope.get("positions")
            method = f", {positions['method']}" if positions else ""
            parts.append(f"{self.rope['factor']:g}x {self.rope['rope_type']}{method}")
        if self.first_s is not None and self.last_s is not None:
            parts.append(f"first token {self.first_s:.2f} s")
            if num_generated > 1:
                each_ms = (self.last_s - self.first_s) / (num_generated - 1) * 1000
                parts.append(f"{each_ms:.3g} ms/token")
        return ", ".join([*parts, *filter(None, [self.cut()])])


class Connection:
    """A connection to one server."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """Open no connection yet. Raises ClientError if the URL is not one of a server."""
        if not url.lower().startswith(("http://", "https://")):
            raise ClientError(f"the URL needs http:// or https:// in front, got {url}")
        self.url = url.rstrip("/").removesuffix("/v1")
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        try:
            self._client = httpx.Client(
                base_url=self.url,
                headers=headers,
                timeout=httpx.Timeout(None, connect=_CONNECT_S),
                trust_env=False,
            )
        except (httpx.InvalidURL, ValueError) as error:
            raise ClientError(f"{url} is no address of a server: {error}") from error

    def close(self) -> None:
        self._client.close()

    def get(self, path: str) -> Any:
        """Return the JSON of a route. Raises ClientError."""
        try:
            response = self._client.get(path)
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error
        return self._json(response)

    def stream(self, body: dict[str, Any], answer: StreamedAnswer) -> Iterator[str]:
        """Send a chat and yield the answer's text piece by piece. Raises ClientError.

        If the iterator is closed early, the connection is closed, which ends the request.
        """
        sent = time.monotonic()
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        try:
            with self._client.stream("POST", "/v1/chat/completions", json=request) as response:
                if response.is_error:
                    response.read()
                    self._json(response)
                for line in response.iter_lines():
                    data = line.removeprefix("data:").strip()
                    if not line.startswith("data:") or data == "[DONE]":
                        continue
                    piece = self._take(json.loads(data), answer)
                    if piece:
                        answer.last_s = time.monotonic() - sent
                        answer.first_s = answer.last_s if answer.first_s is None else answer.first_s
                        yield piece
        except httpx.HTTPError as error:
            raise self._unreachable(error) from error

    @staticmethod
    def _take(event: dict[str, Any], answer: StreamedAnswer) -> str:
        if "error" in event:
            raise ClientError(str(event["error"].get("message")))
        answer.usage = event.get("usage") or answer.usage
        if not event["choices"]:
            return ""
        choice = event["choices"][0]
        answer.rope = choice.get("rope") or answer.rope
        answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
        piece = str(choice["delta"].get("content") or "")
        answer.text += piece
        return piece

    def _json(self, response: httpx.Response) -> Any:
        try:
            found = response.json()
        except ValueError as error:
            raise ClientError(f"{self.url} does not answer in JSON: is it a ropewalk?") from error
        if not response.is_error:
            return found
        detail = found.get("error", {}) if isinstance(found, dict) else {}
        message = detail.get("message") or f"status {response.status_code}"
        if response.status_code == httpx.codes.UNAUTHORIZED:
            message += " Give it with --api-key, or in ROPEWALK_API_KEY."
        if "phase" in detail:
            message += f" ({detail['phase']})"
        raise ClientError(message)

    def _unreachable(self, error: httpx.HTTPError) -> ClientError:
        if isinstance(error, httpx.ConnectError):
            return ClientError(f"no server answers at {self.url}: start one with `ropewalk serve`")
        return ClientError(f"the connection to {self.url} ended: {type(error).__name__}")
