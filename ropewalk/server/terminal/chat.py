"""A conversation in a terminal, with the scaling of each message chosen by command."""

import math
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from ropewalk.server.terminal.connection import ClientError, Connection, StreamedAnswer

_HELP = """\
/rope TYPE [FACTOR]  rescale the next messages, for example /rope yarn 8; /rope off: as deployed
/rope METHOD         read far keys by a position method, for example /rope rerope
/model NAME          talk to another served name; without NAME, list them
/system TEXT         set the system message; without TEXT, remove it
/file PATH           put a file's text in front of the next message
/compare [TYPE]      answer the last message again under a type or method (default: no scaling)
/stats               show the server's requests and cache
/clear               forget the conversation
/help                show this list
Ctrl-C stops an answer. Ctrl-D leaves."""


class Chat:
    """One conversation with one server."""

    def __init__(
        self,
        connection: Connection,
        model: str | None,
        system: str,
        limits: Mapping[str, float | None],
    ) -> None:
        """Look for the model. Raises ClientError if there is no such server or name."""
        self._connection = connection
        self._models = {each["id"]: each for each in connection.get("/v1/models")["data"]}
        self._names = list(self._models)
        self._model = self._checked(model or self._names[0])
        self._system = system
        self._limits = {name: value for name, value in limits.items() if value is not None}
        self._rope: dict[str, Any] = {}
        self._turns: list[dict[str, str]] = []
        self._file_text = ""  # in front of the next message

    def answer_once(self, text: str) -> None:
        """Print the answer to one message, and nothing else. Raises ClientError."""
        if not text.strip():
            raise ClientError("the input is empty")
        answer = StreamedAnswer()
        self._stream([{"role": "user", "content": text}], self._rope, answer)
        sys.stdout.write("\n")
        if answer.cut():
            click.echo(f"ropewalk chat: {answer.cut()}", err=True)

    def converse(self) -> None:
        """Read messages and commands until the end of the input."""
        with suppress(ImportError):
            import readline  # noqa: F401, PLC0415  # gives input() its history and keys
        click.echo(f"{self._model} at {self._connection.url}. /help lists the commands.")
        while True:
            try:
                line = input("> ").strip()
            except EOFError:
                click.echo()
                return
            except KeyboardInterrupt:
                click.echo()
                continue
            try:
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    self._say(line)
            except ClientError as error:
                click.secho(str(error), fg="red", err=True)

    def _say(self, text: str) -> None:
        turn = {"role": "user", "content": self._file_text + text}
        answer = self._shown([*self._turns, turn], self._rope)
        self._file_text = ""
        if answer.text:
            self._turns += [turn, {"role": "assistant", "content": answer.text}]

    def _shown(self, turns: list[dict[str, str]], rope: dict[str, Any]) -> StreamedAnswer:
        """Print an answer and the line of its numbers. Ctrl-C ends the answer."""
        answer = StreamedAnswer()
        try:
            self._stream(turns, rope, answer)
        except KeyboardInterrupt:
            click.secho("\nstopped", dim=True)
            return answer
        click.secho(f"\n{answer.summary()}", dim=True)
        return answer

    def _stream(
        self,
        turns: list[dict[str, str]],
        rope: dict[str, Any],
        answer: StreamedAnswer,
    ) -> None:
        system = [{"role": "system", "content": self._system}] if self._system else []
        body = {"model": self._model, "messages": [*system, *turns], **self._limits}
        if rope:
            body["rope"] = rope
        for piece in self._connection.stream(body, answer):
            sys.stdout.write(piece)
            sys.stdout.flush()

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        commands: dict[str, Callable[[str], None]] = {
            "/rope": self._set_rope,
            "/model": self._set_model,
            "/system": self._set_system,
            "/file": self._read_file,
            "/compare": self._compare,
            "/stats": self._stats,
            "/clear": self._clear,
            "/help": self._help,
        }
        if name not in commands:
            raise ClientError(f"there is no {name}; /help lists the commands")
        commands[name](rest.strip())

    def _set_rope(self, text: str) -> None:
        words = text.split()
        if not words or words == ["off"]:
            self._rope = {}
        elif len(words) > 2:
            raise ClientError(f"/rope takes a type and a factor, got {text}")
        else:
            rope = self._named(words[0])
            if len(words) == 2:
                if "positions" in rope:
                    raise ClientError(f"the position method {words[0]} has no factor")
                rope["factor"] = _factor(words[1])
            self._rope = rope
        click.secho(f"rope: {' '.join(words) if self._rope else 'as deployed'}", dim=True)

    def _set_model(self, name: str) -> None:
        if name:
            self._model = self._checked(name)
        click.secho(
            ", ".join(f"*{each}" if each == self._model else each for each in self._names), dim=True
        )

    def _checked(self, name: str) -> str:
        if name not in self._names:
            raise ClientError(f"there is no model {name}. Served: {', '.join(self._names)}")
        return name

    def _named(self, name: str) -> dict[str, Any]:
        """Return the body's `rope` for a type or a position method. Raises ClientError."""
        served = self._models[self._model]["ropewalk"]
        types = [*served["allowed_rope_types"]]
        types += [] if "default" in types else ["default"]
        methods = served.get("allowed_positions") or []
        if name in methods:
            return {"positions": {"method": name}}
        if name in types:
            return {"rope_type": name}
        allowed = ", ".join(types) + (f"; positions: {', '.join(methods)}" if methods else "")
        raise ClientError(f"{self._model} has no scaling of the type {name}. Allowed: {allowed}")

    def _set_system(self, text: str) -> None:
        self._system = text
        click.secho("system message set" if text else "no system message", dim=True)

    def _read_file(self, text: str) -> None:
        try:
            content = Path(text).expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ClientError(f"cannot read {text or 'a file without a name'} as text") from error
        self._file_text += f"{content}\n"
        click.secho(f"{len(content):,} characters are in front of the next message", dim=True)

    def _compare(self, text: str) -> None:
        if not self._turns:
            raise ClientError("there is no message to answer again yet")
        name = text or "default"
        rope = self._named(name)
        click.secho(f"the last message under {name}:", dim=True)
        self._shown(self._turns[:-1], rope)

    def _stats(self, _: str) -> None:
        stats = self._connection.get("/stats")
        click.echo(
            f"{stats['requests_running']} running, {stats['requests_waiting']} waiting, "
            f"cache {stats['kv_cache_usage_ratio']:.0%} of {stats['kv_cache_tokens']:,} tokens, "
            f"{stats['generated_tokens']:,} tokens generated"
        )

    def _clear(self, _: str) -> None:
        self._turns, self._file_text = [], ""
        click.secho("forgotten", dim=True)

    @staticmethod
    def _help(_: str) -> None:
        click.echo(_HELP)


def _factor(text: str) -> float:
    """Return a factor as it was typed. Raises ClientError."""
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 1 <= found < math.inf:
        raise ClientError(f"the factor must be a number of at least 1, got {text}")
    return found
