"""A large body does not stop another client's stream, nor /health."""

import pytest

from benchmarks.server.long_bodies import measured
from tests.servers.processes import running_server, without_replicas

pytestmark = [pytest.mark.alone, without_replicas]

# `benchmarks.server.long_bodies` measures the largest bodies of a long context.
FLAGS = ("--rope-scaling", '{"rope_type": "yarn", "factor": 64}', "--kv-cache-tokens", "32768")
KINDS = [
    "completions, ids",
    "completions, wrong ids",
    "completions, names",
    "completions, digits",
    "chat, code",
    "chat, messages",
    "tokenize, code of 1 MB",
    "tokenize, digits of 1 MB",
    "detokenize",
]
# One call of the tokenizer took 0.9 s for such a text, and json's own decoder 0.1 s for the ids.
# Other processes of the machine may take the cores for longer than the 50 ms that are wanted.
LONGEST_S = 0.25


def test_streams_and_health_go_on_while_large_bodies_are_read() -> None:
    """Refused ones count, too."""
    with running_server("--threads", "1", *FLAGS) as server:
        found = list(measured(server.url, KINDS))
    assert [kind for kind, *_ in found] == ["nothing", *KINDS]
    assert {status for _, _, status, *_ in found} <= {0, 200, 400}
    for kind, _, _, _, gap_s, health_s in found:
        assert 0 < gap_s < LONGEST_S, found
        assert 0 < health_s < LONGEST_S, (kind, found)
