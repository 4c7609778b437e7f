"""Rows do not depend on the rows computed beside them, to the bit."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from ropewalk.model_runtime.layers import onednn, packed_product
from ropewalk.model_runtime.layers.onednn import OneDnnWeight
from ropewalk.model_runtime.layers.packed_linear import (
    PackedLinear,
    RowwiseActivation,
    pack,
    replace_activations,
)
from ropewalk.model_runtime.layers.packed_product import PackedProduct, Way, Workshop
from ropewalk.model_runtime.layers.way_trial import choose_way, is_possible
from ropewalk.model_runtime.tracing.operations import Linears

ROWS = (1, 2, 3, 7, 8, 16, 31, 32, 33, 64, 65, 100, 128, 257, 512)
WAYS = [(dtype, way) for dtype in (torch.float32, torch.bfloat16) for way in Way]
WAYS.remove((torch.float32, Way.STORED))


def workshop_of(way: Way, dtype: torch.dtype) -> Workshop:
    """A workshop for one way; the test is skipped if the processor does not support it."""
    if not is_possible(way, dtype):
        pytest.skip(f"no {way.name} of {dtype} on this processor or with this torch")
    return Workshop(way)


@pytest.fixture
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Use so many threads of torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("dtype", "way"), WAYS)
@pytest.mark.parametrize(
    ("width_in", "width_out", "threads"),
    [(64, 96, 8), (704, 256, 2), (3072, 1000, 3)],
    indirect=["threads"],
)
def test_a_row_has_the_same_bits_in_any_company(
    width_in: int, width_out: int, dtype: torch.dtype, way: Way
) -> None:
    """Wide inputs are the case in which plain packed products fail."""
    workshop = workshop_of(way, dtype)
    linear = nn.Linear(width_in, width_out).to(dtype).requires_grad_(requires_grad=False)
    x = torch.randn(max(ROWS), width_in).to(dtype)
    packed = PackedLinear(linear, PackedProduct([linear], workshop))
    whole = packed(x)
    for rows in ROWS:
        assert torch.equal(packed(x[:rows]), whole[:rows]), rows
        assert torch.equal(packed(x[-rows:]), whole[-rows:]), rows
    expected = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    bound = 1e-4 if dtype == torch.float32 else 5e-2
    assert float((whole.double() - expected).abs().max()) < bound


@pytest.mark.parametrize(("dtype", "way"), WAYS)
def test_a_wide_row_alone_has_the_bits_it_has_among_others(dtype: torch.dtype, way: Way) -> None:
    """A plain product of one row differs in about one number of 4,000, so many rows are tried."""
    workshop = workshop_of(way, dtype)
    linear = nn.Linear(2048, 2048, bias=False).to(dtype).requires_grad_(requires_grad=False)
    packed = PackedLinear(linear, PackedProduct([linear], workshop))
    x = torch.randn(192, 2048).to(dtype)
    whole = packed(x)
    assert torch.equal(torch.cat([packed(row) for row in x.split(1)]), whole)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("dtype", "threads"),
    [(torch.float32, 1), (torch.float32, 3), (torch.bfloat16, 2)],
    indirect=["threads"],
)
def test_linears_with_one_input_are_one_product(dtype: torch.dtype) -> None:
    """One part has a bias; every row has the bits it has alone, for any number of rows."""
    model = nn.ModuleDict(
        {
            "wide": nn.Linear(704, 256, bias=False),
            "biased": nn.Linear(704, 96),
            "narrow": nn.Linear(704, 96, bias=False),
        }
    ).to(dtype)
    x = torch.randn(max(ROWS), 704).to(dtype)
    expected = {name: linear(x).detach().double() for name, linear in model.items()}
    joined = Linears(tuple(model.values()))
    with torch.inference_mode():
        pack(model, [joined])
        assert {part.product for part in model.values()} == {joined.product}
        whole = {name: part(x) for name, part in model.items()}
        assert torch.equal(torch.cat(list(whole.values()), dim=-1), joined.product(x))
        for rows in ROWS:
            for name, part in model.items():
                assert torch.equal(part(x[:rows]), whole[name][:rows]), (name, rows)
                assert torch.equal(part(x[-rows:]), whole[name][-rows:]), (name, rows)
    bound = 1e-4 if dtype == torch.float32 else 5e-2
    for name, got in whole.items():
        assert float((got.double() - expected[name]).abs().max()) < bound


def test_few_counts_of_rows_reach_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each count costs memory and time to prepare, so rows of zeros fill up to the next one."""
    counts: set[int] = set()
    workshop = workshop_of(Way.ONEDNN, torch.float32)
    linear = nn.Linear(8, 5)
    packed = PackedLinear(linear, PackedProduct([linear], workshop))
    multiply = PackedProduct._multiply
    monkeypatch.setattr(
        PackedProduct, "_multiply", lambda own, x: counts.add(len(x)) or multiply(own, x)
    )
    for rows in range(700):
        assert packed(torch.ones(rows, 8)).shape == (rows, 5)
    assert len(counts) <= 16


def test_shapes_are_a_linears() -> None:
    """A packed product keeps leading dimensions, and an input without rows gives no rows."""
    packed = PackedLinear(nn.Linear(8, 5, bias=False))
    assert packed(torch.randn(2, 3, 8)).shape == (2, 3, 5)
    assert packed(torch.randn(1, 0, 8)).shape == (1, 0, 5)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu"])
@pytest.mark.parametrize(("width", "threads"), [(36, 1), (100, 3), (704, 2)], indirect=["threads"])
def test_an_activation_has_the_same_bits_in_any_company(name: str, width: int) -> None:
    """The width may be no multiple of a vector, and the input may be a slice."""
    activation = RowwiseActivation(ACT2FN[name])
    x = torch.randn(300, width)
    whole = activation(x)
    for rows in (1, 2, 3, 5, 17, 93, 299):
        assert torch.equal(activation(x[:rows]), whole[:rows]), rows
    assert torch.allclose(whole, ACT2FN[name](x), atol=1e-6)
    beside = torch.cat((x, x), dim=-1)[:, :width]  # a slice, as linears with one input give
    assert torch.equal(activation(beside), whole)


def test_linears_and_activations_are_replaced_everywhere() -> None:
    """Nested modules are reached, and a LayerNorm is left as it is."""
    model = nn.Sequential(
        nn.Linear(4, 4), nn.Sequential(nn.SiLU(), nn.Linear(4, 2)), nn.LayerNorm(2)
    )
    x = torch.randn(3, 4)
    expected = model(x)
    pack(model)
    replace_activations(model)
    kinds = [type(module).__name__ for module in model.modules()]
    assert kinds.count("PackedLinear") == 2
    assert kinds.count("RowwiseActivation") == 1
    assert torch.allclose(model(x), expected, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_way_that_is_chosen_is_possible(dtype: torch.dtype) -> None:
    """Every processor has at least one way to multiply."""
    assert is_possible(choose_way(dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_onednn_every_row_is_multiplied_over_own_panels(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """A build of torch without oneDNN multiplies every row over our own panels."""
    monkeypatch.setattr(onednn, "is_available", lambda: False)
    assert choose_way.__wrapped__(dtype) is Way.OWN


def test_onednn_that_refuses_a_number_type_is_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """OneDNN refuses bfloat16 on processors without AVX-512."""

    class Refusing(OneDnnWeight):
        def __init__(self, weight_NK: Tensor) -> None:
            if weight_NK.dtype == torch.bfloat16:
                raise RuntimeError("bf16 path needs the cpu support avx512")
            super().__init__(weight_NK)

    monkeypatch.setattr(packed_product, "OneDnnWeight", Refusing)
    can_widen = is_possible(Way.STORED, torch.bfloat16)
    expected = Way.STORED if can_widen else Way.OWN
    assert choose_way.__wrapped__(torch.bfloat16) is expected


def test_stored_weights_take_half_the_memory_of_float32() -> None:
    """Weights are stored in bfloat16; float32 scratch memory does not grow with the model."""
    workshop = workshop_of(Way.STORED, torch.bfloat16)
    linears = [nn.Linear(1024, 2048, bias=False).to(torch.bfloat16) for _ in range(3)]
    products = [PackedProduct([linear], workshop) for linear in linears]
    skinny = [product.skinny(1) for product in products]
    assert [each.packed_Q.nbytes for each in skinny if each] == [2 * 1024 * 2048] * 3
    ((shape, scratch),) = workshop._scratch.items()
    assert shape[1] == 1024
    assert scratch.memory().nbytes <= 1 << 20


def test_stored_weights_give_the_product_of_the_widened_numbers() -> None:
    """Products of stored weights are summed in float32 and rounded to bfloat16 once."""
    workshop = workshop_of(Way.STORED, torch.bfloat16)
    linear = nn.Linear(300, 70).to(torch.bfloat16).requires_grad_(requires_grad=False)
    x = torch.randn(100, 300).to(torch.bfloat16)
    exact = nn.functional.linear(x.double(), linear.weight.double(), linear.bias.double())
    got = PackedProduct([linear], workshop)(x)
    apart = (got.double() - exact).abs() / exact.abs().clamp(min=0.05)
    assert float(apart.max()) < 2**-8  # half a unit of bfloat16, and what float32 sums lose
