"""Requests that are too long: the sentence, the field and the numbers of the error."""

import re

import pytest

from ropewalk.model_runtime.deployments.deployment import Deployment, RopeRequest
from ropewalk.model_runtime.errors import ContextLengthError
from tests.model_runtime.deployments.test_deployment import plain


def test_a_request_beyond_the_cache_is_beyond_the_context() -> None:
    """The error has the code, the numbers and the hint of any request that is too long."""
    deployment = plain().within_cache(512)
    assert (deployment.max_len, plain().within_cache(2048)) == (512, plain())
    assert deployment.choose(RopeRequest(), 512, 1).tier.factor == 2
    with pytest.raises(ContextLengthError) as caught:
        deployment.choose(RopeRequest(), 500, 100)
    assert caught.value.code == "context_length_exceeded"
    assert (caught.value.details["n_prompt_tokens"], caught.value.details["n_ctx"]) == (500, 512)
    told = str(caught.value)
    assert "maximum context length is 512 tokens (the size of the KV cache)" in told
    assert told.endswith("configured with a larger KV cache. max_tokens may be at most 13.")
    deployment.choose(RopeRequest(), 500, 13)
    with pytest.raises(ContextLengthError, match=r"256 tokens \(the requested factor 1\)"):
        deployment.choose(RopeRequest(policy="fixed", factor=1), 300, 1)


@pytest.mark.parametrize(
    ("deployment", "num_prompt", "max_tokens", "end"),
    [
        (plain(), 1020, 9, "factor 4). * 1028 in all. A * 5 (1280 tokens) * for it. * most 5."),
        (
            plain().within_cache(512),
            2000,
            1,
            "of 8 (2048 tokens) * for it and with a larger KV cache.",
        ),
        (plain(max_model_len=700), 701, 1, "would fit, * with a larger max_model_len."),
        (plain(max_model_len=700), 1400, 1, "for it and with a larger max_model_len."),
        (plain(rope_scaling={"rope_type": "default"}), 257, 1, "256 tokens (the trained length). "),
    ],
)
def test_a_sentence_about_a_long_request_names_its_limit(
    deployment: Deployment, num_prompt: int, max_tokens: int, end: str
) -> None:
    """A larger cache or context alone is suggested only if the factor suffices."""
    with pytest.raises(ContextLengthError) as caught:
        deployment.choose(RopeRequest(), num_prompt, max_tokens)
    assert re.search(".*".join(map(re.escape, end.split("*"))), str(caught.value)), caught.value
    assert caught.value.param == ("max_tokens" if num_prompt <= deployment.max_len else "prompt")


def test_an_error_does_not_name_max_tokens_that_the_client_did_not_send() -> None:
    """The prompt alone is too long then."""
    with pytest.raises(ContextLengthError, match=r"has 1025 prompt tokens\. A rope ") as caught:
        plain().choose_open(RopeRequest(), 1025)
    assert (caught.value.details["max_tokens"], caught.value.param) == (None, "prompt")
