"""Null in every optional field of every body, and in the document that describes them."""

import json
from collections.abc import Iterator, Mapping
from typing import Any, get_args

import httpx
import pytest
from pydantic import BaseModel

from tests.server.fuzz.fuzz_bodies import ROUTES
from tests.servers.processes import Server


def bodies(model: type[BaseModel]) -> Iterator[type[BaseModel]]:
    """Yield every model inside a body, the body included."""
    found, todo = set[type[BaseModel]](), [model]
    while todo:
        current = todo.pop()
        if current in found:
            continue
        found.add(current)
        yield current
        parts = [field.annotation for field in current.model_fields.values()]
        while parts:
            part = parts.pop()
            parts += get_args(part)
            if isinstance(part, type) and issubclass(part, BaseModel):
                todo.append(part)


@pytest.mark.parametrize("path", list(ROUTES))
def test_null_passes_for_every_optional_field(server: Server, path: str) -> None:
    """An answer with nulls everywhere, in fields of other servers, too, equals one without."""
    model, base = ROUTES[path]
    plain = {name: json.loads(value) for name, value in base.items()}
    nulls = dict.fromkeys(
        field.alias or name for name, field in model.model_fields.items() if not field.is_required()
    )
    body = {**nulls, "kv_transfer_params": None, "anything": None, **plain, "temperature": 0}
    if "temperature" not in model.model_fields:
        body["temperature"] = None
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=30)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("path", list(ROUTES))
def test_the_document_allows_null_where_the_server_does(server: Server, path: str) -> None:
    """Every optional field of every object of a body may be null in the schema."""
    for model in bodies(ROUTES[path][0]):
        schema = model.model_json_schema()
        required = schema.get("required", ())
        for name, field in schema["properties"].items():
            kinds: list[Mapping[str, Any]] = field.get("anyOf", [field])
            is_any = not any(key in field for key in ("type", "anyOf", "$ref", "enum", "const"))
            may_be_null = is_any or any(
                each.get("type") == "null" or None in each.get("enum", ()) for each in kinds
            )
            assert name in required or may_be_null, (model.__name__, name)
    document = httpx.get(f"{server.url}/openapi.json").json()
    content = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]
    name = content["schema"]["$ref"].rsplit("/", 1)[1]
    assert document["components"]["schemas"][name]["additionalProperties"] == {"type": "null"}
