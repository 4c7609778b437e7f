"""Compile and render chat templates in a process of its own; `template_renderer.py` starts it.

The environment is that of transformers 5: blocks trimmed, `break` and `continue`, the tag
`generation`, the filter `tojson`, and the functions below. The process imports Jinja and the
standard library only, so it starts in 0.1 s. It answers what comes over its standard input, which
is a socket, until that ends. The kernel ends it if an answer takes too long.

Asked: JSON, {"template": text, "seconds": limit}, and "values" to render. Answered: one byte, an
ANSWER, and the text in ENCODING.
"""

import json
import signal
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from multiprocessing.connection import Connection
from typing import Any

from jinja2 import Template, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ropewalk.model_runtime.child_process import limit_seconds, prepare_limits

ENCODING = ("utf-8", "surrogatepass")  # JSON's escapes can make half a character
# The first byte of an answer.
DONE = b"D"  # the rendered text; without values, the names that the template reads, as JSON
REFUSED = b"R"  # the template's own words, or Jinja's
FAILED = b"F"  # an error of an expression
_LONGEST_PROBLEM = 300  # characters
# Chats may take turns between a tokenizer's named templates, and a long one takes 50 ms to compile.
_MOST_COMPILED = 3


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


@lru_cache(_MOST_COMPILED)
def _compiled(text: str) -> tuple[Template, list[str]]:
    """Return a template, and the names that it reads."""
    made = environment()
    return made.from_string(text), sorted(meta.find_undeclared_variables(made.parse(text)))


def answer(asked: Mapping[str, Any]) -> bytes:
    """Return one of the ANSWERs and its text."""
    try:
        template, names = _compiled(asked["template"])
        if "values" not in asked:
            return DONE + json.dumps(names).encode()
        return DONE + template.render(asked["values"]).encode(*ENCODING)
    except TemplateSyntaxError as error:
        return REFUSED + _short(f"line {error.lineno}: {error.message}")
    except TemplateError as error:
        return REFUSED + _short(str(error))
    except Exception as error:  # noqa: BLE001  # an expression in a template may raise any error
        return FAILED + _short(f"{type(error).__name__}: {error}")


def _short(text: str) -> bytes:
    return text[:_LONGEST_PROBLEM].encode(*ENCODING)


def main() -> None:
    """Answer until the standard input ends, as it does when the server dies."""
    for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # They come to a whole group; the server ends in its own time, and needs this process.
        signal.signal(ignored, signal.SIG_IGN)
    prepare_limits()
    with Connection(sys.stdin.fileno()) as connection, suppress(EOFError, OSError):
        while True:
            asked = json.loads(connection.recv_bytes())
            limit_seconds(asked["seconds"])
            answered = answer(asked)
            limit_seconds(0)
            connection.send_bytes(answered)
