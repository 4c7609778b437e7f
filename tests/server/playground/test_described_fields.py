"""Every field of /openapi.json has a sentence, its limits and an example that is right."""

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest

from ropewalk.server.api.strict_body import Body
from ropewalk.server.settings.request_sections import LimitSettings
from tests.server.fuzz.fuzz_bodies import ROUTES
from tests.servers.processes import Server

MESSAGE = {"role": "user", "content": "a"}
# What an example needs beside it, if the body has such a field.
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "return_progress": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "max_completion_tokens": {"max_tokens": None},
    "continue_final_message": {"messages": [MESSAGE, {"role": "assistant", "content": "b"}]},
}


@pytest.fixture(scope="module")
def document(server: Server) -> Any:
    """The document of a server with all routes."""
    return httpx.get(f"{server.url}/openapi.json", timeout=30).json()


def fields(document: Any) -> Iterator[tuple[str, str, Any]]:
    """Each field of each body: its schema, its name, its own schema."""
    for schema_name, schema in document["components"]["schemas"].items():
        for name, field in schema.get("properties", {}).items():
            yield schema_name, name, field


def test_each_field_has_a_sentence(document: Any) -> None:
    """In one line, which ends as a sentence does."""
    found = list(fields(document))
    assert len(found) > 600
    for schema, name, field in found:
        text = field.get("description", "")
        assert re.fullmatch(r"[A-Z`0-9][^\n]+[.]|[A-Z][^\n]+[.]\)", text), (schema, name, text)
    for name, schema in document["components"]["schemas"].items():
        assert schema["description"].endswith("."), name


def test_each_field_has_an_example_that_its_schema_allows(document: Any) -> None:
    """The schemas refer to each other, so they are compiled as the properties of one."""
    named = {f"{schema}.{name}": field for schema, name, field in fields(document)}
    whole = {"properties": named, "components": document["components"]}
    validator = jsonschema_rs.validator_for(whole)
    for name, field in named.items():
        assert field.get("examples"), name
        for example in field["examples"]:
            validator.validate({name: example})


def test_no_name_shows_a_module(document: Any) -> None:
    """Names of schemas are those of our classes, and titles are plain."""
    for name, schema in document["components"]["schemas"].items():
        assert re.fullmatch(r"[A-Z][A-Za-z]+", name)
        assert "__" not in str(schema.get("title"))
    assert not re.search(r"ropewalk__|server__", str(document))


@pytest.mark.parametrize("path", ROUTES)
def test_a_body_with_an_example_is_valid(document: Any, path: str) -> None:
    """One field at a time, beside what the field needs."""
    model, base = ROUTES[path]
    assert issubclass(model, Body)
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    schema = document["components"]["schemas"][content["schema"]["$ref"].rsplit("/", 1)[1]]
    assert model.__name__ == schema["title"]
    for name, field in schema["properties"].items():
        beside = {key: each for key, each in BESIDE.get(name, {}).items() if key in model.known}
        if path == "/tokenize" and name not in {"prompt", "model", "add_special_tokens"}:
            beside = {"prompt": None, "messages": [MESSAGE], **beside}
        for example in field["examples"]:
            body = {key: json.loads(value) for key, value in base.items()}
            model.model_validate({**body, **beside, name: example})


def test_limits_that_are_settings_are_told_with_their_defaults(document: Any) -> None:
    """A number behind the name of a setting is its default."""
    told = [
        found
        for _, _, field in fields(document)
        for found in re.findall(r"`(max_\w+)` \((\d+)\)", field["description"])
    ]
    names = {name for name, _ in told}
    assert "max_n" in names
    for name, number in told:
        assert LimitSettings.model_fields[name].default == int(number), name
