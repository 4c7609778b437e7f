"""Drafts over a real socket: OpenAI's `prediction`, the usage, and the metrics."""

from collections.abc import Iterator
from typing import Any

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
    """The usage has the tokens that were chosen, in whole answers and in streams.

    The metrics have those of all requests.
    """
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
    samples = samples_of(steady)
    drafted = total(samples, "ropewalk_draft_tokens_total")
    assert drafted >= total(samples, "ropewalk_draft_tokens_accepted_total") > 40
