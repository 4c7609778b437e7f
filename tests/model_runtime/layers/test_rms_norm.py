"""One pass over a row gives the result of the model's own RMSNorm; other modules are kept."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.cohere.modeling_cohere import CohereLayerNorm
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

from ropewalk.model_runtime.layers import match_norm
from ropewalk.model_runtime.layers.match_norm import TorchRmsNorm
from ropewalk.model_runtime.layers.rms_norm import CenteredNorm, RmsNorm, cpu_candidates

ROWS = (1, 2, 3, 7, 8, 33, 200)


class WrongEps(LlamaRMSNorm):
    """A norm that states one eps and uses another."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Compute the norm with ten times the eps."""
        mean = hidden_states.pow(2).mean(-1, keepdim=True)
        out: Tensor = self.weight * hidden_states * torch.rsqrt(mean + 10 * self.variance_epsilon)
        return out


def replace_norms(model: nn.Module) -> None:
    """Replace norms as for a CPU."""
    match_norm.replace_norms(model, cpu_candidates)


def replaced(norm: nn.Module) -> nn.Module:
    """The module after the replacement of norms."""
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    holder = nn.ModuleDict({"norm": norm})
    replace_norms(holder)
    return holder["norm"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 64, 384, 1000])
@pytest.mark.parametrize("make", [LlamaRMSNorm, GemmaRMSNorm, nn.RMSNorm])
def test_the_same_norm(make: Any, width: int, dtype: torch.dtype) -> None:
    """Float64 and the module are the references; a row has the same bits among any others."""
    original = make(width, eps=1e-5).to(dtype)
    norm = replaced(original)
    assert isinstance(norm, RmsNorm)
    x = (torch.randn(2, max(ROWS), width) * torch.rand(max(ROWS), 1) * 40).to(dtype)
    with torch.inference_mode():
        whole, expected = norm(x), original(x)
        for rows in ROWS:
            assert torch.equal(norm(x[:, :rows]), whole[:, :rows])
            assert torch.equal(norm(x[:, -rows:]), whole[:, -rows:])
    weight = original.weight.double() + (1 if make is GemmaRMSNorm else 0)
    wide = x.double()
    exact = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5) * weight
    rounding = 1e-6 if dtype == torch.float32 else 2**-8  # half of bf16's step is 2^-9
    assert whole.dtype == dtype
    assert torch.allclose(whole.double(), exact, rtol=rounding, atol=1e-6)
    assert torch.allclose(whole.float(), expected.float(), rtol=2 * rounding, atol=1e-5)


class PlusOneLayerNorm(nn.LayerNorm):
    """A LayerNorm with 1 + weight, as Nemotron's."""

    def forward(self, x: Tensor) -> Tensor:
        """Compute the norm."""
        shape, weight = self.normalized_shape, self.weight + 1
        return nn.functional.layer_norm(x, shape, weight, self.bias, self.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [16, 384, 1000])
@pytest.mark.parametrize("make", [nn.LayerNorm, CohereLayerNorm, PlusOneLayerNorm])
def test_the_same_layer_norm(make: Any, width: int, dtype: torch.dtype) -> None:
    """Float64 is the reference, with a mean far from zero; a row has the same bits among others."""
    original = make(width, eps=1e-5).to(dtype)
    norm = replaced(original)
    assert type(norm) is CenteredNorm
    x = (torch.randn(2, max(ROWS), width) * (torch.rand(max(ROWS), 1) * 40 + 2) + 3).to(dtype)
    with torch.inference_mode():
        whole = norm(x)
        for rows in ROWS:
            assert torch.equal(norm(x[:, :rows]), whole[:, :rows])
            assert torch.equal(norm(x[:, -rows:]), whole[:, -rows:])
    weight = original.weight.double() + (make is PlusOneLayerNorm)
    bias = getattr(original, "bias", None)
    bias = bias if bias is None else bias.double()
    exact = nn.functional.layer_norm(x.double(), (width,), weight, bias, 1e-5)
    rounding = 2e-6 if dtype == torch.float32 else 2**-8
    assert torch.allclose(whole.double(), exact, rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torchs_own_is_the_same_norm(dtype: torch.dtype) -> None:
    """Torch's RMSNorm replaces Llama's on a GPU."""
    original = LlamaRMSNorm(384, eps=1e-5).to(dtype)
    nn.init.uniform_(original.weight, 0.5, 1.5)
    x = (torch.randn(5, 384) * torch.tensor([1e-3, 1.0, 3.0, 30.0, 1e3])[:, None]).to(dtype)
    with torch.inference_mode():
        got, expected = TorchRmsNorm(original.weight, 1e-5)(x), original(x)
    assert got.dtype == dtype
    rounding = 1e-5 if dtype == torch.float32 else 2**-7
    assert torch.allclose(got.float(), expected.float(), rtol=rounding, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_stays_nan(dtype: torch.dtype) -> None:
    """A row with NaN stays visible and does not affect other rows."""
    norm = replaced(LlamaRMSNorm(64).to(dtype))
    x = torch.ones(3, 64, dtype=dtype)
    x[1, 5] = torch.nan
    with torch.inference_mode():
        answer = norm(x)
    assert bool(answer[1].isnan().all())
    assert bool(answer[::2].isfinite().all())


@pytest.mark.parametrize(
    "module",
    [
        WrongEps(64, eps=1e-6),
        Qwen3NextRMSNormGated(64),
        nn.RMSNorm(64),  # its eps depends on the dtype
        LlamaRMSNorm(64).half(),
        nn.Linear(64, 64),
    ],
    ids=lambda module: type(module).__name__,
)
def test_others_are_left(module: nn.Module) -> None:
    """Norms that have a gate, or use another eps or dtype are left."""
    assert replaced(module) is module


class PerHead(LlamaRMSNorm):
    """A norm that takes only four dimensions."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Raise ValueError for an input of two dimensions."""
        _, _, _, _ = hidden_states.shape
        return super().forward(hidden_states)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [0.02, 1e-4, 0.0])
def test_small_weights_do_not_hide_another_formula(size: float, dtype: torch.dtype) -> None:
    """With small weights a norm that subtracts the mean differs little, with zeros not at all."""
    centered = nn.LayerNorm(64, eps=1e-5, bias=False)
    wrong = WrongEps(64, eps=1e-3)
    for norm, kind in ((centered, CenteredNorm), (wrong, WrongEps)):
        nn.init.uniform_(norm.weight, -size, size)
        holder = nn.ModuleDict({"norm": norm.to(dtype)})
        replace_norms(holder)
        assert type(holder["norm"]) is kind
    right = LlamaRMSNorm(64, eps=1e-5)
    nn.init.uniform_(right.weight, -size, size)
    holder = nn.ModuleDict({"norm": right.to(dtype)})
    replace_norms(holder)
    found = holder["norm"]
    assert isinstance(found, RmsNorm)
    assert torch.equal(torch.from_numpy(found.scale_D), right.weight.detach().float())


def test_large_weights_do_not_hide_an_added_one() -> None:
    """Beside 60, one is less than the rounding of bfloat16, by which norms are compared."""
    norm = GemmaRMSNorm(64)
    nn.init.uniform_(norm.weight, 60, 70)
    holder = nn.ModuleDict({"norm": norm.to(torch.bfloat16)})
    replace_norms(holder)
    found = holder["norm"]
    assert isinstance(found, RmsNorm)
    assert torch.equal(torch.from_numpy(found.scale_D), 1 + norm.weight.detach().float())


@pytest.mark.parametrize("norm", [PerHead(8), LlamaRMSNorm(1)])
def test_norms_that_do_not_take_rows_are_left_alone(norm: nn.Module) -> None:
    """A norm that does not take rows is left alone, and loading goes on."""
    holder = nn.ModuleDict({"norm": norm})
    replace_norms(holder)
    assert holder["norm"] is norm
