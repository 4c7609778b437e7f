"""Every field of /openapi.json has a sentence, its limits and an example that is right."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema_rs
import pytest

from ropewalk.server.api.strict_body import Body
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


def test_each_field_has_an_example_that_its_schema_allows(document: Any) -> None:
    """The schemas refer to each other, so they are compiled as the properties of one."""
    named = {f"{schema}.{name}": field for schema, name, field in fields(document)}
    whole = {"properties": named, "components": document["components"]}
    validator = jsonschema_rs.validator_for(whole)
    for name, field in named.items():
        assert field.get("examples"), name
        for example in field["examples"]:
            validator.validate({name: example})


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
