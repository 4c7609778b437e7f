"""Messages between processes: what is sent is what arrives."""

import json
import socket
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.parallel.wire import (
    Kind,
    Link,
    SpanPacker,
    SpanUnpacker,
    json_bytes,
    profile_of,
    profile_values,
)
from ropewalk.model_runtime.runner.cuda_graphs import CaptureLimits
from ropewalk.rope import (
    NTK,
    DualChunk,
    DynamicNTK,
    Linear,
    Llama3,
    LongRope,
    Profile,
    ReRope,
    SelfExtend,
    Shifted,
    Sinks,
    Unscaled,
    Yarn,
)

numbers = st.integers(0, 2**31 - 1)
spans = st.builds(
    Span,
    st.lists(numbers, max_size=5),
    numbers,
    st.lists(numbers, max_size=5),
    numbers,
    st.lists(numbers, max_size=5),
    states=st.just(()),  # models with states are not divided, nor are caches that quantise pages
    tail_page=st.just(0),
)


@given(st.lists(spans, max_size=4), numbers)
def test_spans_survive_the_wire(sent: list[Span], num_unknown: int) -> None:
    """Pages arrive as an array, and everything else as it was."""
    found, num_found = SpanUnpacker().unpack(SpanPacker().pack(sent, num_unknown))
    assert num_found == num_unknown
    assert [each._replace(pages=list(each.pages)) for each in found] == sent
    assert all(isinstance(each.pages, np.ndarray) for each in found)


def test_the_limits_of_captured_steps_survive_the_wire() -> None:
    """Ranks with other limits would capture or take other steps, and wait for each other."""
    limits = CaptureLimits(256, 6, 9, 32, 4096)
    assert CaptureLimits(**json.loads(json_bytes(asdict(limits)))) == limits


def test_a_page_table_is_sent_when_it_has_changed() -> None:
    """Rows come and go, and a table may move to another row."""
    packer, unpacker = SpanPacker(), SpanUnpacker()
    first, second, third = (np.arange(num, dtype=np.int32) for num in (900, 800, 700))
    sizes = []
    for tables in ([first, second], [first, second], [second], [second, third], [third, [5, 6]]):
        sent = [Span([1], 8, each, 0, [0]) for each in tables]
        for _ in range(2):
            content = packer.pack(sent)
            found, _ = unpacker.unpack(content)
            assert [each.pages.tolist() for each in found] == [[*each] for each in tables]
            assert all(np.array_equal(each.token_ids, [1]) for each in found)
        sizes.append(len(content))
    assert sizes == [60, 60, 32, 60, 68]


@pytest.mark.parametrize(
    "profile",
    [
        Profile(Unscaled()),
        Profile(Linear(factor=0.1 + 0.2)),
        Profile(NTK(factor=2.0), 4096),
        Profile(DynamicNTK(factor=2.0, original_max_position_embeddings=64, num_tokens=128)),
        Profile(Yarn(factor=4.0, original_max_position_embeddings=64, mscale=0.707)),
        Profile(Unscaled(), 64, ReRope(window=32)),
        Profile(Unscaled(), None, SelfExtend(window=32, group=4)),
        Profile(Unscaled(), None, Shifted(shift=32, window=8, factor=1.5)),
        Profile(Unscaled(), None, Sinks(sinks=4, window=60)),
        Profile(Unscaled(), None, DualChunk(chunk_size=48, local_size=16, temperature_factor=1.1)),
        Profile(Llama3(factor=8.0, original_max_position_embeddings=8192)),
        Profile(
            LongRope(
                short_factor=(1.0, 1.5),
                long_factor=(2.0, 3.7),
                factor=4.0,
                original_max_position_embeddings=64,
                num_tokens=256,
            )
        ),
    ],
    ids=lambda profile: profile.name,
)
def test_profiles_survive_the_wire(profile: Profile) -> None:
    """Equal profiles rotate alike, so the followers' tables have the same numbers."""
    assert profile_of(json.loads(json_bytes(profile_values(profile)))) == profile


def test_the_end_of_a_process_is_the_end_of_its_messages() -> None:
    """Messages that were sent before it still arrive."""
    ends = socket.socketpair()
    with ends[0], ends[1]:
        first, second = map(Link, ends)
        first.send(Kind.STEP, b"x" * 100_000)
        assert not second.is_closed()
        assert second.receive() == (Kind.STEP, b"x" * 100_000)
        first.shut()
        assert second.is_closed()
        assert second.receive() is None
        with pytest.raises(OSError, match="Broken pipe"):
            second.send(Kind.STEP, b"")
