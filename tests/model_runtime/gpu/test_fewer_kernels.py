"""A GPU's replacements compute what transformers' modules compute; other modules are kept.

On a GPU where there is one, else by Triton's interpreter, which truncates to bfloat16.
"""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

pytest.importorskip("triton", reason="triton is for Linux on x86-64")

from benchmarks.gpu import launches
from ropewalk.model_runtime.attention.paged_attention import STEP, AttentionCall
from ropewalk.model_runtime.gpu.gated_block import Activation, GatedBlock, gated
from ropewalk.model_runtime.gpu.residual_layer import (
    ResidualLayer,
    fuse_residuals,
    use_fewer_kernels,
)
from ropewalk.model_runtime.gpu.rms_norm import (
    GpuRmsNorm,
    Scale,
    add_and_normalize,
    candidates,
    normalize,
)
from ropewalk.model_runtime.layers.last_layer import pruned_layer
from ropewalk.model_runtime.layers.match_norm import replace_norms
from ropewalk.model_runtime.layers.merged_linear import forget_results, shared_inputs
from ropewalk.model_runtime.loading import checkpoint as loading
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.patch_model import patch_model
from tests.checkpoints.tiny_models import in_dtype, tiny_model
from tests.doubles.engines import EngineFactory, answer, checkpoint_of, deployment_of, request
from tests.oracles.triton_attention import use_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
IS_INTERPRETED = DEVICE.type == "cpu"
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


@pytest.mark.sampled(by="make")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [16, 100, 1024])
@pytest.mark.parametrize("make", [LlamaRMSNorm, GemmaRMSNorm])
def test_a_residual_and_its_norm_are_those_of_transformers(
    make: Any, width: int, dtype: torch.dtype
) -> None:
    """The sum is the same to the bit, because it is rounded once in both."""
    norm, scale = norm_of(make, width, dtype)
    residual, x = torch.randn(2, 1, 7, width, device=DEVICE).to(dtype)
    with torch.inference_mode():
        summed, normed = add_and_normalize(residual, x, scale)
        assert near(normed, norm(residual + x))
        exact = dtype != torch.bfloat16 or not IS_INTERPRETED
        assert torch.equal(summed, residual + x) if exact else near(summed, residual + x)
        if dtype == torch.float16 and IS_INTERPRETED:  # a GPU approximates the root
            assert torch.equal(normed, norm(residual + x)), "rounded at the same places"
        inner, inner_scale = norm_of(make, width, dtype)
        summed, normed = add_and_normalize(residual, x, scale, inner_scale)
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
    whole = add_and_normalize(residual, x, scale)
    x[0, 4, 3] = torch.nan
    spoilt = add_and_normalize(residual, x, scale)
    for got, expected in zip(spoilt, whole, strict=True):
        assert torch.equal(got[:, :4], expected[:, :4])
        assert torch.equal(got[:, 5:], expected[:, 5:])
    assert bool(spoilt[1][0, 4].isnan().all())


@pytest.mark.sampled(by="activation")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [16, 1500])
@pytest.mark.parametrize("activation", Activation)
def test_a_gate_is_that_of_torch(activation: Activation, half: int, dtype: torch.dtype) -> None:
    """Large values of both signs are included."""
    joined = (torch.randn(3, 2 * half, device=DEVICE) * 30).to(dtype)
    gate, up = joined.chunk(2, dim=-1)
    active = (
        nn.functional.silu(gate)
        if activation is Activation.SILU
        else nn.functional.gelu(gate, approximate="tanh")
    )
    got, expected = gated(joined, activation).float(), (active * up).float()
    bound = 2 * ROUNDING[dtype]
    # tanh(-z) + 1 has few digits for large z, and torch's formula computes it.
    assert torch.allclose(got, expected, rtol=bound, atol=1e-3 if activation else bound)


class OwnValue:
    """A step whose attention gives each token its own value."""

    def attend(self, layer_idx: int, call: AttentionCall) -> Tensor:
        """Return the values, one for each query head."""
        del layer_idx
        heads = call.query_1HTD.shape[1] // call.value_1KTV.shape[1]
        return call.value_1KTV.repeat_interleave(heads, dim=1).transpose(1, 2).contiguous()


def logits(model: nn.Module) -> Tensor:
    """Logits of a short prompt, with that attention."""
    ids = torch.arange(1, 12, device=DEVICE)[None]
    with torch.inference_mode():
        answered = model(input_ids=ids, position_ids=ids - 1, use_cache=False, **{STEP: OwnValue()})
    out: Tensor = answered.logits
    return out


def replaced(
    architecture: str, dtype: torch.dtype = torch.float32, **overrides: Any
) -> tuple[dict[str, int], float]:
    """Numbers of modules by class after the replacement, and the largest change of a logit."""
    model: Any = in_dtype(tiny_model(architecture, **overrides), dtype).to(DEVICE)
    patch_model(model, read_native_rope(model))
    before = logits(model)
    use_fewer_kernels(model, shared_inputs(model))
    fuse_residuals(model)
    kinds = [type(module).__name__ for module in model.modules()]
    numbers = {kind: kinds.count(kind) for kind in set(kinds)}
    linked = [
        each for each in model.modules() if isinstance(each, ResidualLayer) if each._following
    ]
    apart = float((logits(model) - before).abs().max() / before.std())
    return {**numbers, "linked": len(linked)}, apart


@pytest.mark.costly
@pytest.mark.sampled(drawn=1)
@pytest.mark.parametrize(
    ("architecture", "norms_per_layer", "num_gates"),
    [
        ("llama", 2, 1),
        ("qwen2", 2, 1),
        ("qwen3", 4, 1),
        ("gemma", 2, 1),
        ("gemma2", 4, 1),
        ("gemma3_text", 6, 1),
        ("phi3", 2, 1),
        ("glm4", 4, 1),
        ("mixtral", 2, 0),
    ],
)
def test_layers_of_these_models_are_fused(
    architecture: str, norms_per_layer: int, num_gates: int
) -> None:
    """Norms, gates and residuals; every layer's sum is normalised for the next, the last's too."""
    kinds, apart = replaced(architecture)
    num_layers = kinds["ResidualLayer"]
    assert num_layers == 4 == kinds["linked"]
    assert kinds["GpuRmsNorm"] == num_layers * norms_per_layer + 1
    assert kinds.get("GatedBlock", 0) == num_layers * num_gates
    assert apart < 1e-5


@pytest.mark.costly
@pytest.mark.parametrize("architecture", ["llama", "gemma2"])
def test_a_float16_model_is_fused_without_more_error(architecture: str) -> None:
    """Checkpoints of AWQ and GPTQ name float16. float64 with the same weights is the reference."""

    def error_of(model: nn.Module) -> float:
        apart = logits(model).double() - expected
        return float(apart.norm() / expected.norm())

    models: list[Any] = []
    for dtype in (torch.float16, torch.float64):
        rounded = in_dtype(tiny_model(architecture), torch.float16)
        models.append(in_dtype(rounded, dtype).to(DEVICE))
        patch_model(models[-1], read_native_rope(models[-1]))
    model, exact = models
    expected = logits(exact)
    before = error_of(model)
    use_fewer_kernels(model, shared_inputs(model))
    fuse_residuals(model)
    layers = [each for each in model.modules() if isinstance(each, ResidualLayer)]
    assert len(layers) == 4 == sum(bool(layer._following) for layer in layers)
    assert not any(type(each).__name__.endswith("RMSNorm") for each in model.modules())
    assert 0 < error_of(model) < 1.5 * before < 1e-2


@pytest.mark.costly
@pytest.mark.sampled(drawn=2)
@pytest.mark.parametrize(
    ("architecture", "overrides", "kept"),
    [
        # The output is multiplied before it is added.
        ("granite", {"residual_multiplier": 0.5}, "GraniteDecoderLayer"),
        # Attention and block read the same norm, which subtracts the mean.
        ("cohere", {}, "CohereDecoderLayer"),
        # Norms follow attention and block only.
        ("olmo2", {}, "Olmo2DecoderLayer"),
        ("llama", {"hidden_act": "relu"}, "LlamaMLP"),
        ("llama", {"hidden_act": "gelu"}, "LlamaMLP"),  # erf in place of tanh
    ],
)
def test_modules_that_compute_something_else_are_left(
    architecture: str, overrides: dict[str, Any], kept: str
) -> None:
    """The model answers as before, with the modules that it has."""
    kinds, apart = replaced(architecture, **overrides)
    assert kinds[kept] == 4
    assert apart < 1e-5


@pytest.mark.costly
def test_a_float16_layer_that_multiplies_its_output_is_left() -> None:
    """Its bound is above what rounding does, and far below this."""
    kinds, _ = replaced("granite", torch.float16, residual_multiplier=0.9)
    assert kinds["GraniteDecoderLayer"] == 4


@pytest.mark.costly
@pytest.mark.sampled
@pytest.mark.parametrize("make", [LlamaMLP, GemmaMLP])
def test_a_block_alone_is_recognised_by_its_outputs(make: Any) -> None:
    """`GemmaMLP` has the activation of its config, here tanh's."""
    model: Any = tiny_model("llama" if make is LlamaMLP else "gemma").to(DEVICE)
    patch_model(model, read_native_rope(model))
    use_fewer_kernels(model, shared_inputs(model))
    blocks = [each for each in model.modules() if isinstance(each, GatedBlock)]
    wanted = Activation.SILU if make is LlamaMLP else Activation.GELU_TANH
    assert {block.activation for block in blocks} == {wanted}


@pytest.mark.parametrize("module", [nn.LayerNorm(64, bias=False), nn.RMSNorm(64), nn.Linear(8, 8)])
def test_other_norms_are_left(module: nn.Module) -> None:
    """Another formula, and an eps that depends on the dtype."""
    holder = nn.ModuleDict({"norm": module.to(DEVICE)})
    replace_norms(holder, candidates)
    assert holder["norm"] is module


def test_a_kept_norm_is_for_its_own_sum_only() -> None:
    """Equal numbers in another tensor are normalised anew, and nothing stays in memory."""
    norm, scale = norm_of(LlamaRMSNorm, 64, torch.float32)
    gpu_norm = GpuRmsNorm(nn.Parameter(scale.weight_D), scale)
    residual, x = torch.randn(2, 1, 3, 64, device=DEVICE)
    with torch.inference_mode():
        summed = gpu_norm.keep_sum(residual, x, None)
        assert near(gpu_norm(summed), norm(residual + x))
        assert gpu_norm.has_used_kept
        assert gpu_norm._sum is gpu_norm._norm is None
        gpu_norm.keep_sum(residual, x, None)
        assert near(gpu_norm(x), norm(x))
        assert not gpu_norm.has_used_kept
        assert gpu_norm._sum is gpu_norm._norm is None


def test_a_norm_of_another_tensor_is_not_linked() -> None:
    """The last norm is called with a copy of the sum, so its layer adds without it."""
    hook = register_module_forward_pre_hook(
        lambda module, inputs: (
            (inputs[0].clone(),) if getattr(module, "is_of_copies", False) else None
        )
    )
    try:
        model: Any = tiny_model("llama").to(DEVICE)
        patch_model(model, read_native_rope(model))
        before = logits(model)
        replace_norms(model, candidates)
        model.model.norm.is_of_copies = True
        fuse_residuals(model)
        layers = model.model.layers
        assert [bool(layer._following) for layer in layers] == [True] * 3 + [False]
        assert float((logits(model) - before).abs().max() / before.std()) < 1e-5
    finally:
        hook.remove()


def test_a_layer_with_an_output_of_another_dtype_is_left() -> None:
    """Its rounding is not known, so nothing says whether it computes the same."""
    hook = register_module_forward_hook(
        lambda module, _, out: out.double() if isinstance(module, ResidualLayer) else None
    )
    try:
        assert replaced("llama")[0]["LlamaDecoderLayer"] == 4
    finally:
        hook.remove()


@pytest.mark.costly
def test_a_failed_forward_leaves_no_sum_and_no_norm() -> None:
    """The memory may be that which the retry needs."""
    model: Any = tiny_model("llama").to(DEVICE)
    patch_model(model, read_native_rope(model))
    use_fewer_kernels(model, shared_inputs(model))
    fuse_residuals(model)
    norm = model.model.layers[1].post_attention_layernorm

    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    norm.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        logits(model)
    gc.collect()
    kept = [weakref.ref(each) for each in (norm._sum, norm._norm)]
    assert all(each() is not None for each in kept)
    forget_results(model)
    assert all(each() is None for each in kept)


@pytest.mark.costly
def test_a_model_is_checked_and_served_with_them(
    monkeypatch: pytest.MonkeyPatch, engines: EngineFactory
) -> None:
    """The whole GPU path: self-check, a pruned last layer, and answers equal to the CPU's."""
    expected_checkpoint = checkpoint_of(tiny_model("llama"))
    prompts = [[(7 * at + length) % 60 + 3 for at in range(length)] for length in (3, 40)]

    def answers(checkpoint: Any) -> list[list[int]]:
        deployment = deployment_of(checkpoint)
        asked = [request(deployment, ids, max_tokens=3, ignore_eos=True) for ids in prompts]
        return [list(each.token_ids) for each in answer(engines.over(checkpoint), *asked)]

    expected = answers(expected_checkpoint)
    if IS_INTERPRETED:
        monkeypatch.setattr(loading, "has_cpu_kernels", lambda _: False)
        monkeypatch.setattr(loading, "has_gpu_kernels", lambda _: True)
        use_triton(monkeypatch)
    checkpoint = checkpoint_of(tiny_model("llama").to(DEVICE))
    assert sum(isinstance(each, ResidualLayer) for each in checkpoint.model.modules()) == 4
    assert pruned_layer(checkpoint.model) == 3
    assert checkpoint.report.difference <= checkpoint.report.threshold
    assert answers(checkpoint) == expected


@pytest.mark.long
@pytest.mark.skipif(not IS_INTERPRETED, reason="launches are counted in the interpreter")
def test_a_layer_of_a_decode_step_has_three_launches_fewer() -> None:
    """Attention's own kernels are counted apart, because they change with its backend."""
    plain, joined, fused = launches.rows()
    attention = {
        name: count
        for name, count in fused["kernels"].items()
        if name.startswith("_") and name not in {"_normalize", "_gate"}
    }
    others = {name: count for name, count in fused["kernels"].items() if name not in attention}
    assert others == {"linear": 4, "_normalize": 2, "_gate": 1}
    assert joined["launches"] == fused["launches"] + 3 == sum(attention.values()) + 10
    assert plain["launches"] == sum(attention.values()) + 27
