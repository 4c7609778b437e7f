"""Compile and render chat templates in a process with limits; `template_processes.py` starts it.

A checkpoint's template is an unchecked program. Jinja's sandbox keeps it from Python, and
not from time and memory: a loop, or a constant that Jinja folds while it compiles, takes all there
is. In this process the kernel ends a template that exceeds its time, and refuses it more memory.

The environment is that of transformers 5: blocks trimmed, `break` and `continue`, the tag
`generation`, the filter `tojson`, and the functions below. The process imports Jinja and the
standard library only, so it starts in 60 ms. It reads frames of its standard input and answers each
with one, in order, until the input ends.

Frame: the content's length in 8 bytes, and the content. Asked: JSON, {"template": text} or, of the
template before, {"values": {...}}; and the limit of its "seconds". Answered: one byte, an ANSWER,
and the text in ENCODING.
"""

import json
import signal
import struct
import sys
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, BinaryIO

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ropewalk.model_runtime.child_process import (
    limit_memory,
    limit_seconds,
    memory_in_use,
    prepare_limits,
)

LENGTH = struct.Struct(">Q")
ENCODING = ("utf-8", "surrogatepass")  # JSON's escapes can make half a character
# The first byte of an answer.
DONE = b"D"  # the names that a template reads, as JSON; or the rendered text
REFUSED = b"R"  # the template's own words, or Jinja's
FAILED = b"F"  # an error of an expression
TOO_MUCH_MEMORY = b"M"
TOO_LONG = b"L"  # the text
_LONGEST_PROBLEM = 300  # characters
_MOST_COMPILED = 3  # templates that are kept: those of one tokenizer
# A text is its request several times over: characters of four bytes, pieces, the whole, its bytes.
_LEAST_BYTES = 64 * 2**20
_BYTES_PER_BYTE = 32
_LEAST_CHARACTERS = 2**20
_CHARACTERS_PER_BYTE = 8


def max_bytes(num_asked: int) -> int:
    """Return the memory of an answer to a request of so many bytes."""
    return _LEAST_BYTES + _BYTES_PER_BYTE * num_asked


def max_characters(num_asked: int) -> int:
    """Return the longest text of an answer to a request of so many bytes."""
    return _LEAST_CHARACTERS + _CHARACTERS_PER_BYTE * num_asked


class _Generation(Extension):
    """The tag around an assistant's text, which is for training; its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012  # as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        # A call, because the variables that the body sets must not be seen outside of it.
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    @staticmethod
    def _body(caller: Any) -> str:
        text: str = caller()
        return text


class _Dict:
    """The global `dict`, without the attributes of the type."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


class _Namespace(Namespace):
    """The global `namespace`, which takes no name that begins with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `self=` is a name, too
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,  # noqa: FBT001, FBT002  # templates may pass it by place
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,  # noqa: FBT001, FBT002
) -> str:
    # Jinja's own filter escapes HTML.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  # local time, as the templates expect


def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment in which templates are compiled."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _tojson
    made.globals.update(
        raise_exception=_raise_exception,
        strftime_now=_strftime_now,
        dict=_Dict(),
        namespace=_Namespace,
    )
    return made


class TemplateServer:
    """Answers requests about one template after the other."""

    def __init__(self) -> None:
        self._environment = environment()
        self._template: Template | None = None
        # The last ones that were compiled, with their names: chats may take turns between a
        # tokenizer's named templates, and a long one takes 50 ms to compile.
        self._compiled: dict[str, tuple[Template, list[str]]] = {}

    def answer(self, asked: Mapping[str, Any], longest: int) -> bytes:
        """Return one of the ANSWERs and its content; a text has at most `longest` characters."""
        try:
            if "template" in asked:
                return DONE + json.dumps(self._compile(asked["template"])).encode()
            assert self._template is not None, "the parent sends the template first"
            text = self._template.render(asked["values"])
            return DONE + text.encode(*ENCODING) if len(text) <= longest else TOO_LONG
        except TemplateSyntaxError as error:
            return REFUSED + _short(f"line {error.lineno}: {error.message}")
        except TemplateError as error:
            return REFUSED + _short(str(error))
        except MemoryError:
            return TOO_MUCH_MEMORY
        except Exception as error:  # noqa: BLE001  # an expression in a template may raise any error
            return FAILED + _short(f"{type(error).__name__}: {error}")

    def _compile(self, text: str) -> list[str]:
        """Compile a template, and return the names that it reads."""
        found = self._compiled.pop(text, None)
        if found is None:
            parsed = self._environment.parse(text)
            names = sorted(meta.find_undeclared_variables(parsed))
            found = self._environment.from_string(text), names
        self._compiled[text] = found
        if len(self._compiled) > _MOST_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        self._template, names = found
        return names


def _short(text: str) -> bytes:
    return text[:_LONGEST_PROBLEM].encode(*ENCODING)


def _answered(server: TemplateServer, stream: BinaryIO, in_use: int | None) -> bytes | None:
    """Read the next frame under its own limits and return the answer; None at the end."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (length,) = LENGTH.unpack(head)
    if in_use is not None:
        limit_memory(in_use + max_bytes(length))
    frame = stream.read(length)
    if len(frame) < length:
        return None
    asked = json.loads(frame)
    limit_seconds(asked["seconds"])
    answer = server.answer(asked, max_characters(length))
    limit_seconds(0)
    return answer


def main() -> None:
    """Answer frames of the standard input until it ends, as it does when the server dies."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # They come to a whole group; the server ends in its own time, and needs this process.
        signal.signal(ignored, signal.SIG_IGN)
    prepare_limits()
    server, in_use = TemplateServer(), memory_in_use()
    while (answer := _answered(server, sys.stdin.buffer, in_use)) is not None:
        sys.stdout.buffer.write(LENGTH.pack(len(answer)) + answer)
        sys.stdout.buffer.flush()
        if answer == TOO_MUCH_MEMORY:
            return  # what is left of the memory is in pieces
