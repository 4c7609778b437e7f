"""Steps by part: floors are sums over the products of a shape, and every kind of step runs."""

import re

import pytest
import torch

from benchmarks.cpu_kernels import Rates
from benchmarks.make_model import Shape
from benchmarks.step_floors import KINDS, Kind, Made, floors, format_of, make, row_of, table

pytestmark = pytest.mark.costly(by="file")

_SHAPE = Shape(256, 22, 4, 2, 512, 1088)
_NUM_LAYERS = 1


@pytest.fixture(scope="module")
def made() -> Made:
    return make(_SHAPE, _NUM_LAYERS)


def test_a_floor_is_that_of_the_shapes_multiply_adds(made: Made) -> None:
    """Reading is free here, and one multiply-add takes a second."""
    rates = Rates(operations=2.0, read_bytes=float("inf"))
    hidden, between, head = 256, 512, 1088
    heads, key_heads, dim = 4, 2, 64
    weights = hidden * (heads + 2 * key_heads) * dim + heads * dim * hidden + 3 * hidden * between
    found = floors(made, Kind(num_decodes=8, num_prompt=128), rates)
    assert found["products"] == (8 + 128) * weights
    assert found["head"] == (8 + 1) * hidden * head
    pairs = 8 * 129 + sum(range(1, 129))
    assert found["attention"] == 2 * heads * dim * pairs
    assert found["widening"] == 0


def test_a_floor_of_one_row_is_that_of_its_bytes(made: Made) -> None:
    """Q4_K takes 4.625 bits and Q6_K 6.5625; multiply-adds are free here."""
    rates = Rates(operations=float("inf"), read_bytes=1.0)
    num_bits = {"Q4_K": 4.625, "Q6_K": 6.5625}
    shapes = {
        "q_proj": 256 * 256, "k_proj": 256 * 128, "v_proj": 256 * 128, "o_proj": 256 * 256,
        "gate_proj": 256 * 512, "up_proj": 256 * 512, "down_proj": 512 * 256,
    }  # fmt: skip
    names = {each: f"model.layers.0.{each}.weight" for each in shapes}
    expected = sum(
        num_bits[format_of(names[each], _NUM_LAYERS).name] / 8 * size
        for each, size in shapes.items()
    )
    found = floors(made, Kind(1, 0), rates)
    assert found["products"] == expected == found["widening"]
    assert found["head"] == num_bits["Q6_K"] / 8 * 256 * 1088
    assert found["attention"] == 2 * 4 * 2 * 64 * 129


@torch.inference_mode()
def test_every_kind_of_step_has_a_row(made: Made) -> None:
    """A row has the step, its parts and the time against one thread."""
    rates = Rates(1e11, 1e10)
    text = table([row_of(made, kind, rates, rounds=1) for kind in KINDS])
    firsts = re.findall(r"^\| ([\d, +]+) \| \d+ \|", text, re.MULTILINE)
    assert firsts == ["1", "8", "8 + 128", "64", "512", "2,048"]
    assert all(line.count("(") == 5 for line in text.splitlines()[2:])
