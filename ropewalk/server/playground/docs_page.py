"""The HTML of the page. It needs no network, and no script runs in it."""

import base64
import hashlib
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote, urlencode

from ropewalk.server.playground.schema_words import Schema, example, field_rows, kind, referred_name

_STYLE = """
:root { color-scheme: light dark; --back: #fff; --text: #1b1f24; --line: #8c959f; --soft: #eef1f4;
  --link: #1f5f8b; }
@media (prefers-color-scheme: dark) { :root { --back: #12161c; --text: #e6edf3; --line: #6b7682;
  --soft: #1d242d; --link: #6cb6ef; } }
body { background: var(--back); color: var(--text); font: 1rem/1.5 system-ui, sans-serif;
  margin: 0 auto; max-width: 60rem; overflow-wrap: anywhere; padding: 1rem; }
a { color: var(--link); }
h2 { border-top: 1px solid var(--line); margin-top: 2.5rem; padding-top: 1rem; }
table { border-collapse: collapse; display: block; overflow-wrap: normal; overflow-x: auto; }
caption { text-align: left; font-weight: bold; }
th, td { border: 1px solid var(--line); padding: .2rem .5rem; text-align: left;
  vertical-align: top; }
pre { background: var(--soft); border: 1px solid var(--line); overflow-x: auto; padding: .5rem; }
.skip:not(:focus) { position: absolute; left: -99rem; }
"""
_ADDRESS = "http://127.0.0.1:8000"
_HOST = re.compile(r"(?:[A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?")
_HASH = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
HEADERS = {
    "Content-Security-Policy": (
        f"default-src 'none'; style-src 'sha256-{_HASH}'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
_METHODS = ("get", "post", "put", "patch", "delete")


def address_of(scheme: str, host: str, root_path: str) -> str:
    """Return the address under which a client asked, or the default one if `host` is no host.

    `host` is the client's header. The result needs no quotes in a shell and in HTML.
    """
    path = quote(root_path.rstrip("/"))
    return f"{scheme}://{host}{path}" if _HOST.fullmatch(host) else f"{_ADDRESS}{path}"


def render(
    document: Mapping[str, Any],
    model: str,
    open_paths: frozenset[str] | None,
    address: str = _ADDRESS,
) -> str:
    """Return the page of an OpenAPI document.

    `model` stands for the name in a path. `open_paths` need no API key; None: no path needs one.
    `address` is that of the server in the examples.
    """
    components = document["components"]["schemas"]
    operations = [
        (method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
        if method in _METHODS
    ]
    links = "".join(
        f'<li><a href="#{_anchor(method, path)}">{method.upper()} {escape(path)}</a></li>'
        for method, path, _ in operations
    )
    title = f"{document['info']['title']} {document['info']['version']}"
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}: the API</title><style>{_STYLE}</style></head><body>",
        '<a class="skip" href="#operations">Skip to the operations</a>',
        f"<header><h1>{escape(title)}</h1>",
        '<p>The same as a document for programs: <a href="openapi.json">openapi.json</a>.',
        ""
        if open_paths is None
        else " The examples need the variable <code>ROPEWALK_API_KEY</code> with an API key.",
        "</p></header>",
        f'<nav aria-label="Operations"><ul>{links}</ul></nav><main id="operations">',
    ]
    for method, path, operation in operations:
        needs_key = open_paths is not None and path not in open_paths
        url = address + path.replace("{name}", quote(model))
        curl = _curl(method, url, operation, components, needs_key)
        parts += _operation(method, path, operation, curl)
    parts.append('<h2 id="schemas">Schemas</h2>')
    for name, schema in components.items():
        parts += _schema(name, schema)
    parts.append("</main></body></html>\n")
    return "".join(parts)


def _operation(method: str, path: str, operation: Mapping[str, Any], curl: str) -> Iterator[str]:
    """Yield the parts of one operation."""
    anchor = _anchor(method, path)
    yield f'<section aria-labelledby="{anchor}"><h2 id="{anchor}"><code>{method.upper()} '
    yield f"{escape(path)}</code></h2>"
    if "description" in operation:
        yield f"<p>{escape(operation['description'])}</p>"
    parameters = operation.get("parameters", ())
    if parameters:
        rows = [
            (each["name"], each["in"], kind(each["schema"]), _yes(each.get("required", False)))
            for each in parameters
        ]
        yield _table("Parameters", ("name", "in", "type", "required"), rows)
    if "requestBody" in operation:
        yield f"<p>Body: {_linked(kind(_body(operation)))}, as JSON.</p>"
    answers = [
        (status, _answer_kind(answer), answer["description"])
        for status, answer in operation["responses"].items()
    ]
    yield _table("Responses", ("status", "body", "meaning"), answers)
    yield f'<h3>Example</h3><pre tabindex="0"><code>{escape(curl)}</code></pre></section>'


def _schema(name: str, schema: Schema) -> Iterator[str]:
    """Yield the parts of one component."""
    yield f'<h3 id="schema-{escape(name)}">{escape(name)}</h3>'
    if "description" in schema:
        yield f"<p>{escape(schema['description'])}</p>"
    rows = [
        (row.name, row.kind, row.limits, _yes(row.is_required), row.default, row.text)
        for row in field_rows(schema)
    ]
    heads = ("field", "type", "limits", "required", "default", "meaning")
    yield _table(f"Fields of {name}", heads, rows)


def _table(caption: str, heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Return a table whose first column names its rows."""
    head = "".join(f'<th scope="col">{each}</th>' for each in heads)
    body = "".join(
        f'<tr><th scope="row"><code>{escape(row[0])}</code></th>'
        + "".join(f"<td>{_linked(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f'<table tabindex="0"><caption>{escape(caption)}</caption><tr>{head}</tr>{body}</table>'


def _linked(words: str) -> str:
    """Escape words, and link each name of a component in {braces}."""
    return re.sub(r"\{(\w+)\}", r'<a href="#schema-\1">\1</a>', escape(words))


def _curl(
    method: str,
    url: str,
    operation: Mapping[str, Any],
    components: Mapping[str, Schema],
    needs_key: bool,  # noqa: FBT001  # a private function with one call
) -> str:
    """Return a command that a shell runs as it stands."""
    query = {
        each["name"]: example(each["schema"], components)
        for each in operation.get("parameters", ())
        if each["in"] == "query" and each.get("required")
    }
    lines = [f'curl "{url}{"?" * bool(query)}{urlencode(query)}"']
    if needs_key:
        lines.append('--header "Authorization: Bearer $ROPEWALK_API_KEY"')
    if method == "post":
        body = json.dumps(example(_body(operation), components))
        lines += ["--header 'Content-Type: application/json'", f"--data {shlex.quote(body)}"]
    return " \\\n  ".join(lines)


def _body(operation: Mapping[str, Any]) -> Schema:
    found: Schema = operation["requestBody"]["content"]["application/json"]["schema"]
    return found


def _answer_kind(answer: Mapping[str, Any]) -> str:
    """Return the body of a response in words."""
    contents = answer.get("content", {})
    for media_type, content in contents.items():
        schema = content.get("schema", {})
        return kind(schema) if referred_name(schema) else str(media_type)
    return ""


def _anchor(method: str, path: str) -> str:
    return method + re.sub(r"\W+", "-", path).rstrip("-")


def _yes(is_true: bool) -> str:  # noqa: FBT001  # its only argument
    return "yes" if is_true else ""
