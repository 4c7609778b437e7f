"""A GPU's kernels of layers compute what transformers' modules compute.

On a GPU where there is one, else by Triton's interpreter, which truncates to bfloat16.
"""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytest.importorskip("triton", reason="triton is for Linux on x86-64")


from benchmarks.gpu import launches
from ropewalk.model_runtime.gpu.gate import Activation, activation_of, gate_into
from ropewalk.model_runtime.gpu.rms_norm import (
    Scale,
    candidates,
    normalize,
    normalize_into,
)
from ropewalk.model_runtime.layers.match_norm import replace_norms
from ropewalk.model_runtime.loading import checkpoint as loading
from tests.checkpoints.tiny_models import tiny_model
from tests.doubles.engines import EngineFactory, answer, checkpoint_of, deployment_of, request
from tests.oracles.triton_attention import use_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_INTERPRETED = DEVICE.type == "cpu"
TWO_LAYERS = {"num_hidden_layers": 2}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# A step of the number type at most, and one more where the interpreter truncates.
ROUNDING = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-5}


def near(got: Tensor, expected: Tensor) -> bool:
    """Whether two results differ by rounding only."""
    bound = ROUNDING[expected.dtype]
    return got.dtype == expected.dtype and torch.allclose(
        got.float(), expected.float(), rtol=bound, atol=bound
    )


def norm_of(make: Any, width: int, dtype: torch.dtype) -> tuple[nn.Module, Scale]:
    """A norm of transformers with random weights, and its constants."""
    norm = make(width, eps=1e-5).to(DEVICE, dtype)
    nn.init.uniform_(norm.weight, 0.5, 1.5)
    return norm, Scale(norm.weight.detach(), 1e-5, make is GemmaRMSNorm)


def added(
    residual: Tensor, x: Tensor, scale: Scale, inner: Scale | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of residual and x, and its norm, by one launch."""
    summed, out = torch.empty_like(x), torch.empty_like(x)
    rows = [each.view(-1, x.shape[-1]) for each in (x, out, residual, summed)]
    normalize_into(rows[0], scale, rows[1], residual_RC=rows[2], summed_RC=rows[3], inner=inner)
    return summed, out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("make", "width"), [(LlamaRMSNorm, 100), (GemmaRMSNorm, 1024)])
def test_a_residual_and_its_norm_are_those_of_transformers(
    make: Any, width: int, dtype: torch.dtype
) -> None:
    """The sum is the same to the bit, because it is rounded once in both."""
    norm, scale = norm_of(make, width, dtype)
    residual, x = torch.randn(2, 1, 7, width, device=DEVICE).to(dtype)
    with torch.inference_mode():
        summed, normed = added(residual, x, scale)
        assert near(normed, norm(residual + x))
        exact = dtype != torch.bfloat16 or not IS_INTERPRETED
        assert torch.equal(summed, residual + x) if exact else near(summed, residual + x)
        if dtype == torch.float16 and IS_INTERPRETED:  # a GPU approximates the root
            assert torch.equal(normed, norm(residual + x)), "rounded at the same places"
        inner, inner_scale = norm_of(make, width, dtype)
        summed, normed = added(residual, x, scale, inner_scale)
        assert near(summed, residual + inner(x))
        assert near(normed, norm(residual + inner(x)))


@pytest.mark.parametrize("make", [LlamaRMSNorm, GemmaRMSNorm])
def test_heads_of_a_joined_product_are_normalised_in_place_of_a_copy(make: Any) -> None:
    """Strides of the input do not matter, and the result has none of its own."""
    norm, scale = norm_of(make, 32, torch.float32)
    joined = torch.randn(1, 5, 6, 32, device=DEVICE)
    for x in (
        joined[:, :, 2:5],
        joined[:, :, 2:5].transpose(1, 2),
        joined[0, 0],
        joined[..., 0, :],
    ):
        got = normalize(x, scale)
        assert got.is_contiguous()
        assert near(got, norm(x))
    assert normalize(joined[:, :0], scale).shape == (1, 0, 6, 32)


def test_a_row_with_nan_spoils_no_other() -> None:
    """A row's answer does not depend on the other rows, to the bit."""
    _, scale = norm_of(LlamaRMSNorm, 64, torch.float32)
    residual, x = torch.randn(2, 1, 9, 64, device=DEVICE)
    whole = added(residual, x, scale)
    x[0, 4, 3] = torch.nan
    spoilt = added(residual, x, scale)
    for got, expected in zip(spoilt, whole, strict=True):
        assert torch.equal(got[:, :4], expected[:, :4])
        assert torch.equal(got[:, 5:], expected[:, 5:])
    assert bool(spoilt[1][0, 4].isnan().all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("activation", "half"), [(Activation.SILU, 1500), (Activation.GELU_TANH, 16)]
)
def test_a_gate_is_that_of_torch(activation: Activation, half: int, dtype: torch.dtype) -> None:
    """Large values of both signs are included."""
    joined = (torch.randn(3, 2 * half, device=DEVICE) * 30).to(dtype)
    gate, up = joined.chunk(2, dim=-1)
    active = (
        nn.functional.silu(gate)
        if activation is Activation.SILU
        else nn.functional.gelu(gate, approximate="tanh")
    )
    got = torch.empty_like(up)
    gate_into(joined, got, activation)
    got, expected = got.float(), (active * up).float()
    bound = 2 * ROUNDING[dtype]
    # tanh(-z) + 1 has few digits for large z, and torch's formula computes it.
    assert torch.allclose(got, expected, rtol=bound, atol=1e-3 if activation else bound)


@pytest.mark.parametrize("module", [nn.LayerNorm(64, bias=False), nn.RMSNorm(64), nn.Linear(8, 8)])
def test_other_norms_are_left(module: nn.Module) -> None:
    """Another formula, and an eps that depends on the dtype."""
    holder = nn.ModuleDict({"norm": module.to(DEVICE)})
    replace_norms(holder, candidates)
    assert holder["norm"] is module


def test_an_activation_is_recognised_by_its_outputs() -> None:
    """gelu by tanh is known, and by erf it is not."""
    names = ("silu", "gelu_pytorch_tanh", "gelu_new", "gelu", "relu2", "sigmoid")
    found = [activation_of(ACT2FN[name]) for name in names]
    tanh = Activation.GELU_TANH
    assert found == [Activation.SILU, tanh, tanh, None, None, None]


def test_a_model_is_checked_and_served_with_them(
    monkeypatch: pytest.MonkeyPatch, engines: EngineFactory
) -> None:
    """The whole GPU path: self-check, a pruned last layer, and answers equal to the CPU's."""
    expected_checkpoint = checkpoint_of(tiny_model("llama", **TWO_LAYERS))
    prompts = [[(7 * at + length) % 60 + 3 for at in range(length)] for length in (3, 20)]

    def answers(checkpoint: Any) -> list[list[int]]:
        deployment = deployment_of(checkpoint)
        asked = [request(deployment, ids, max_tokens=3, ignore_eos=True) for ids in prompts]
        return [list(each.token_ids) for each in answer(engines.over(checkpoint), *asked)]

    expected = answers(expected_checkpoint)
    if IS_INTERPRETED:
        monkeypatch.setattr(loading, "has_cpu_kernels", lambda _: False)
        monkeypatch.setattr(loading, "has_gpu_kernels", lambda _: True)
        use_triton(monkeypatch)
    checkpoint = checkpoint_of(tiny_model("llama", **TWO_LAYERS).to(DEVICE))
    assert type(checkpoint.model.forward).__name__ == "FlatForward"
    assert checkpoint.report.difference <= checkpoint.report.threshold
    assert answers(checkpoint) == expected


@pytest.mark.long
@pytest.mark.skipif(not IS_INTERPRETED, reason="launches are counted in the interpreter")
def test_a_layer_of_a_list_has_seven_launches_beside_attention() -> None:
    """Attention's own kernels are counted apart, because they change with its backend."""
    plain, normed, listed = launches.rows()
    attention = {
        name: count
        for name, count in listed["kernels"].items()
        if name.startswith("_") and name not in {"_normalize", "_gate"}
    }
    others = {name: count for name, count in listed["kernels"].items() if name not in attention}
    assert others == {"mm": 4, "_normalize": 2, "_gate": 1}
    assert listed["launches"] == sum(attention.values()) + 7
    assert normed["launches"] == sum(attention.values()) + 13
    assert plain["launches"] == sum(attention.values()) + 27
