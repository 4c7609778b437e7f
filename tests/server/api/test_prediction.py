"""Drafts over a real socket: OpenAI's `prediction`, the usage, and the metrics."""

from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests import fixed_costs
from tests.servers.metrics import samples_of, total
from tests.servers.openai_client import openai_client_of
from tests.servers.processes import Server, running_server

MESSAGES: list[Any] = [{"role": "user", "content": "import os\nimport sys\n\ndef "}]
SAMPLED: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 60, "seed": 4, "temperature": 1.0}


@pytest.fixture(scope="module")
def steady() -> Iterator[Server]:
    """A server whose drafts do not follow the load of the machine."""
    with running_server(module=fixed_costs.MODULE) as running:
        yield running


def test_a_predicted_answer_is_the_same_and_counted(steady: Server) -> None:
    """The usage has the tokens that were chosen, in whole answers and in streams."""
    with openai_client_of(steady) as client:
        plain = client.chat.completions.create(model="ropewalk-demo", **SAMPLED)
        text = plain.choices[0].message.content
        assert text
        prediction: Any = {"type": "content", "content": [{"type": "text", "text": text}]}
        again = client.chat.completions.create(
            model="ropewalk-demo", prediction=prediction, **SAMPLED
        )
        assert again.choices[0].message.content == text
        assert again.usage is not None
        details = again.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens or 0) > 20
        chunks = client.chat.completions.create(
            model="ropewalk-demo",
            prediction={"type": "content", "content": text},
            stream=True,
            stream_options={"include_usage": True},
            **SAMPLED,
        )
        *parts, last = list(chunks)
        streamed = (part.choices[0].delta.content or "" for part in parts)
        assert "".join(streamed) == text
        assert last.usage is not None
        details = last.usage.completion_tokens_details
        assert details is not None
        assert (details.accepted_prediction_tokens or 0) > 20


def test_the_metrics_count_drafts(server: Server) -> None:
    """No more are accepted than drafted."""
    with openai_client_of(server) as client:
        client.completions.create(
            model="ropewalk-demo", prompt="a b c d " * 20, max_tokens=40, temperature=0
        )
    samples = samples_of(server)
    drafted = total(samples, "ropewalk_draft_tokens_total")
    assert 0 <= total(samples, "ropewalk_draft_tokens_accepted_total") <= drafted
    assert drafted > 0


@pytest.mark.parametrize(
    ("prediction", "field", "said"),
    [
        ({"type": "edit", "content": "x"}, "prediction.type", "content"),
        ({"type": "content"}, "prediction.content", "missing"),
        ({"type": "content", "content": []}, "prediction.content", "least 1"),
        ({"type": "content", "content": "x", "n": 1}, "prediction.n", "not a field"),
        ({"type": "content", "content": "a" * 100_000}, "prediction", "characters"),
    ],
    ids=str,
)
def test_a_wrong_prediction_is_refused(
    server: Server, prediction: dict[str, Any], field: str, said: str
) -> None:
    """The error names the field."""
    with openai_client_of(server) as client, pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(
            model="ropewalk-demo",
            messages=MESSAGES,
            max_tokens=4,
            extra_body={"prediction": prediction},
        )
    assert refused.value.param == field
    assert said in refused.value.message
