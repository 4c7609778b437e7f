"""Words of whitespace that an answer must not contain."""

from typing import Any

from tests.server.api.asking import asked, tokens_of
from tests.servers.processes import Server


def text_of(server: Server, **fields: Any) -> str:
    """Return the text of a greedy completion."""
    body = {"prompt": "import os\n\ndef join(a, b):\n    return", "max_tokens": 24, **fields}
    return str(asked(server, "completions", **body, temperature=0)["choices"][0]["text"])


def test_a_bad_word_of_whitespace_is_itself(server: Server) -> None:
    """The answers equal those with a logit_bias, which differ for a line break and a space."""
    found, biased = [], []
    for blank in ("\n", " "):
        ids = tokens_of(server, blank, add_special_tokens=False)
        assert len(ids) == 1
        found.append(text_of(server, bad_words=[blank]))
        biased.append(text_of(server, logit_bias={str(ids[0]): -100}))
    assert found == biased
    assert found[0] != found[1]
