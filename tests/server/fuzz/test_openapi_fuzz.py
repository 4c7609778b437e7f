"""Cases that schemathesis makes from the live OpenAPI document, against a real process.

The document's own limits are tried, from both sides. Contexts are short instead of max_tokens being
held back, so that every field keeps every value. FUZZ_CASES and FUZZ_SEED as in test_raw_fuzz.py; a
failure prints a curl command.
"""

import time
from collections import Counter
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import GenerationMode
from schemathesis.config import GenerationConfig

from tests.server.fuzz.attack import (
    MOST_ERROR_BYTES,
    NUM_CASES,
    SEED,
    greedy,
    wait_until_idle,
)
from tests.servers.processes import Server
from tests.servers.progress import say

pytestmark = pytest.mark.alone

_MODES = [GenerationMode.POSITIVE, GenerationMode.NEGATIVE]


def description(server: Server) -> Any:
    """The server's own OpenAPI document, read by schemathesis."""
    return schemathesis.openapi.from_url(f"{server.url}/openapi.json")


def operations(server: Server) -> list[Any]:
    """Every method of every route."""
    return [found.ok() for found in description(server).get_all_operations()]


def checks(*names: str) -> list[Any]:
    """Checks of schemathesis, by name."""
    return [getattr(schemathesis.checks, name) for name in names]


CHECKS = checks(
    "not_a_server_error",
    "response_schema_conformance",
    "unsupported_method",
    "negative_data_rejection",
)


def send(case: Any, session: requests.Session, statuses: Counter[int]) -> None:
    """Send one case and check its answer."""
    response = case.call(session=session, timeout=30)
    statuses[response.status_code] += 1
    num_bytes = len(response.content)
    if response.status_code >= 400:
        said = f"{response.status_code} of {num_bytes} bytes\n{case.as_curl_command()}"
        assert num_bytes <= MOST_ERROR_BYTES, said
    case.validate_response(response, checks=CHECKS)


def generated(
    operation: Any, mode: GenerationMode, num_cases: int, session: requests.Session
) -> Counter[int]:
    """Send so many random cases of an operation; returns the statuses by number."""
    statuses: Counter[int] = Counter()

    @seed(SEED)
    @settings(
        max_examples=num_cases,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        phases=[Phase.generate],  # not smaller and smaller ones: a failing case is repeatable
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case: Any) -> None:
        send(case, session, statuses)

    run()
    return statuses


def coverage(operation: Any, session: requests.Session) -> Counter[int]:
    """Every limit, type and field of an operation in turn, and methods that it does not have."""
    statuses: Counter[int] = Counter()
    for case in operation.schema.iter_coverage_cases(
        operation, generation_modes=_MODES, generation_config=GenerationConfig()
    ):
        send(case, session, statuses)
    return statuses


@pytest.mark.long
@pytest.mark.timeout(0 if NUM_CASES > 5000 else 300)
def test_routes_answer_as_the_document_describes(attacked: Server) -> None:
    """Systematic cases come first, then random ones, valid and invalid.

    A greedy completion has the same answer before and after.
    """
    say(f"\nFUZZ_SEED={SEED} FUZZ_CASES={NUM_CASES}")
    before, began, num_cases = greedy(attacked), time.monotonic(), 0
    first_line = len(attacked.log)
    with requests.Session() as session:
        for operation in operations(attacked):
            statuses = coverage(operation, session)
            statuses += generated(operation, _MODES[0], max(NUM_CASES, 1500) // 160, session)
            if operation.body:  # nothing is wrong with a GET without parameters
                statuses += generated(operation, _MODES[1], max(NUM_CASES, 1500) // 160, session)
            num_cases += statuses.total()
            say(f"{time.monotonic() - began:6.1f} s {operation.label}: {dict(statuses)}")
    assert num_cases >= NUM_CASES // 4, num_cases
    assert not any(wait_until_idle(attacked).values())
    assert greedy(attacked) == before
    assert not [line for line in attacked.log[first_line:] if "Traceback" in line]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        pytest.param("POST", "/v1/completions", {"prompt": 5}, id="400"),
        pytest.param("POST", "/v1/completions", {"prompt": "a", "model": "x"}, id="404"),
        pytest.param("GET", "/metrics", None, id="content type"),
    ],
)
def test_statuses_and_content_types_are_in_the_document(
    attacked: Server, method: str, path: str, body: Any
) -> None:
    """Schemathesis checks each answer against the document."""
    operation = description(attacked)[path][method]
    given_body = {} if body is None else {"body": body, "media_type": "application/json"}
    case = operation.Case(**given_body)
    names = ("status_code_conformance", "content_type_conformance")
    case.validate_response(case.call(timeout=30), checks=checks(*names))
