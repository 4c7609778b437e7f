"""Load a model id or folder into a patched and checked model that is ready to serve.

Weights come from safetensors, quantised or not, or from a GGUF file. Code from the checkpoint runs
only if trust_remote_code is set.
"""

import gc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import structlog
import torch
from torch import nn
from transformers import GenerationConfig

from ropewalk.model_runtime.attention.cache_layout import CacheLayout
from ropewalk.model_runtime.attention.eight_bits import Scales
from ropewalk.model_runtime.attention.paged_attention import LayerPlan
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.gguf_file import read_gguf
from ropewalk.model_runtime.formats.gguf.gguf_sizes import num_parameters
from ropewalk.model_runtime.gpu_nodes import has_gpu_kernels
from ropewalk.model_runtime.layers.low_bits.executors import choose_products
from ropewalk.model_runtime.layers.low_bits.executors import products_text as stored_products_text
from ropewalk.model_runtime.layers.match_norm import replace_norms
from ropewalk.model_runtime.loading.files.file_versions import file_versions
from ropewalk.model_runtime.loading.files.gguf_checkpoint import (
    load_gguf_model,
    load_gguf_tokenizer,
)
from ropewalk.model_runtime.loading.files.pretrained import (
    NO_ADAPTER,
    from_pretrained,
    load_tokenizer,
)
from ropewalk.model_runtime.loading.full_check import FullCheck
from ropewalk.model_runtime.loading.generation_config import generation_of
from ropewalk.model_runtime.loading.known_check import CheckMemory, check_memory
from ropewalk.model_runtime.loading.load_faults import faults_of
from ropewalk.model_runtime.loading.load_progress import logged_progress
from ropewalk.model_runtime.loading.low_bits.hold import return_freed_memory, storage_of
from ropewalk.model_runtime.loading.low_bits.planned import planned_storage
from ropewalk.model_runtime.loading.low_bits.quantise import Distance, quantise_model
from ropewalk.model_runtime.loading.low_bits.sizes import (
    Activations,
    Storage,
    Weights,
    format_of_type,
    is_kept,
    refuse_int8,
)
from ropewalk.model_runtime.loading.model_config import ModelConfig, read_model_config
from ropewalk.model_runtime.loading.native_tables import read_native_rope
from ropewalk.model_runtime.loading.notes import notes_of
from ropewalk.model_runtime.loading.pack_model import (
    BY_TORCH,
    Division,
    decoder_of,
    exact_products,
    pack,
    products_text,
    rule_experts,
)
from ropewalk.model_runtime.loading.patch_model import (
    patch_with_states,
    plans_of_part,
)
from ropewalk.model_runtime.loading.phases import OnPhase, no_phases
from ropewalk.model_runtime.loading.self_check import (
    PagedPrompts,
    SelfCheckReport,
    has_same_bits,
)
from ropewalk.model_runtime.loading.text_part import factory_of
from ropewalk.model_runtime.page_groups import ONE_GROUP, PageGroups
from ropewalk.model_runtime.probing.probe import text_config
from ropewalk.model_runtime.probing.untouched import (
    prompt_ids,
    text_ids_of,
)
from ropewalk.model_runtime.runner.backends import has_cpu_kernels
from ropewalk.model_runtime.size_text import size_text
from ropewalk.model_runtime.state_shape import StateShape
from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.model_runtime.transfer import make_current
from ropewalk.rope import NativeRope

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model ready to serve."""

    model: nn.Module
    plans: Mapping[int, LayerPlan]
    native: NativeRope
    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    sampling_defaults: Mapping[str, float]  # of its files, by SamplingParams' names
    vocab_size: int
    dtype: torch.dtype
    device: torch.device
    report: SelfCheckReport  # of the self-check
    products: str  # layout of the weights and kernel of their products
    outline: ModelConfig | None = None  # read before the weights; None: as for `source`
    source: Path | None = None  # the folder or GGUF file; None if the model was not loaded from one
    versions: Mapping[Path, str | None] = field(
        default_factory=dict
    )  # of its files, before the load
    low_bits: Storage | None = None  # of weights in few bits, if there are any
    states: Mapping[int, StateShape] = field(default_factory=dict)  # by layer; empty: it has none
    distance: Distance | None = None  # of int8 weights from the stored ones
    rounding: Distance | None = None  # of rounded activations from exact ones
    left_out: tuple[str, ...] = ()  # a sentence for each part of its files that is not used
    scales: Mapping[int, Scales] = field(default_factory=dict)  # of codes of eight bits, by layer
    exact_batches: bool = False  # on a GPU: asked for, and found by the self-check

    @property
    def windows(self) -> dict[int, int | None]:
        """Return the keys that each layer reads at most; None: all of them."""
        return {index: plan.window for index, plan in self.plans.items()}

    def cache_layout(
        self, page_size: int, kv_cache_dtype: str, groups: PageGroups = ONE_GROUP
    ) -> CacheLayout:
        """Return the layout of its cache, of the only rank."""
        form = self.dtype, page_size, kv_cache_dtype
        return CacheLayout(self.plans, *form, groups, self.states)


def load_checkpoint(
    source: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    weights: Weights = "stored",
    activations: Activations = "exact",
    exact_batches: bool = False,
    on_phase: OnPhase = no_phases,
    on_native: Callable[[NativeRope], object] | None = None,
    division: Division | None = None,
    remembers: bool = False,
) -> Checkpoint:
    """Load, patch and check a model. Raises ModelError with a sentence that names the problem.

    `weights`: `stored` keeps the bits of the files, `int8` quantises on a CPU, and `dequantised`
    makes floats. `activations`: `int8` and `fp8` round the rows of products with quantised weights,
    and `auto` is that of `planned_storage`.
    `exact_batches`: as `prepare_model` has it. `on_native` gets the rotary tables of the config
    before any weight is read, and may raise. `division`: this process is one of several that hold
    the model together. `remembers`: a check of the same files by an earlier process counts
    (known_check.py), on a CPU and in one process.
    """
    versions = file_versions(source)
    model_config = read_model_config(
        source, dtype=dtype, device=device, trust_remote_code=trust_remote_code
    )
    where, number_type = model_config.device, model_config.dtype
    if weights == "int8":
        refuse_int8(where.type, is_divided=division is not None)
    if activations == "auto" and not has_cpu_kernels(where):
        activations = "exact"
    if activations != "exact":  # its refusals, and what auto is
        planned = planned_storage(
            model_config, weights, activations, is_divided=division is not None
        )
        if activations == "auto":
            activations = "int8" if planned is not None and planned.is_rounding else "exact"
    if on_native is not None:
        on_native(model_config.native())
    memory = None
    # Code of a checkpoint may come from another repository, whose version is not known.
    if remembers and division is None and has_cpu_kernels(where) and not trust_remote_code:
        facts = {
            "dtype": str(number_type),
            "weights": weights,
            "activations": activations,
            "threads": str(torch.get_num_threads()),
        }
        memory = check_memory(versions, facts)
    how = _How(weights, activations, exact_batches, on_phase, division, memory)
    try:
        return _load(model_config, versions, how)
    except ModelError as error:
        if memory is None or memory.known is None:
            raise
        memory = memory.forgotten(error)
    # The error and a program's own cycle kept the first model, and two may not fit.
    gc.collect()
    return_freed_memory()
    return _load(model_config, versions, replace(how, memory=memory))


@dataclass(frozen=True, slots=True)
class _How:
    """The settings of a load, and the check of an earlier one."""

    weights: Weights
    activations: Activations
    exact_batches: bool
    on_phase: OnPhase
    division: Division | None
    memory: CheckMemory | None

    @property
    def keeps_bits(self) -> bool:
        return self.weights != "dequantised" and self.division is None


def _load(outline: ModelConfig, versions: Mapping[Path, str | None], how: _How) -> Checkpoint:
    """Read, patch and check. Raises ModelError."""
    path, dtype, device = Path(outline.source), outline.dtype, outline.device
    how.on_phase("loading weights")
    _log.info("loading_weights", model=str(path), dtype=str(dtype), device=str(device))
    with faults_of(str(path), dtype, device):
        (tokenizer, end_ids), left_out = tokenizer_of(outline), notes_of(outline)
        read = _read_gguf if path.is_file() else _read_folder
        model = read(outline, how)
        if how.division is None:
            model = model.to(device).eval()
        else:  # the weights to divide are still in their files
            model = how.division.leave_in_file(model, dtype, device).eval()
        low_bits = _quantised(model, tokenizer, how)
        checkpoint = prepare_model(
            model,
            tokenizer,
            end_ids,
            generation_of(outline).sampling,
            how.on_phase,
            activations=how.activations,
            exact_batches=how.exact_batches,
            division=how.division,
            memory=how.memory,
        )
    return replace(
        checkpoint,
        outline=outline,
        source=path,
        versions=versions,
        left_out=left_out + checkpoint.left_out,
        **low_bits,
    )


def _read_folder(outline: ModelConfig, how: _How) -> Any:
    """Read the weights of a folder. Raises ModelError."""
    codes_on, dtype = _codes_on(outline.device), outline.dtype
    is_held = how.keeps_bits and (codes_on is not None or is_kept(outline.stored))
    if outline.stored is not None and not is_held:
        name = str(dtype).removeprefix("torch.")
        how.on_phase(f"dequantising {outline.stored} to {name}")
    if how.division is not None and outline.stored is None:
        dtype = how.division.read_dtype(getattr(outline.config, "dtype", None), dtype)
    return _load_model(outline, dtype, keeps_bits=how.keeps_bits, device=codes_on)


def _read_gguf(outline: ModelConfig, how: _How) -> Any:
    """Read the weights of a GGUF file. Raises ModelError."""
    path = Path(outline.source)
    file = read_gguf(path)
    types = (each.type_name for each in file.tensors.values())
    keeps_bits = how.keeps_bits and any(map(format_of_type, types))
    sizes = file.num_bytes, num_parameters(file)
    how.on_phase(_gguf_phase(*sizes, outline.dtype, keeps_bits=keeps_bits))
    if how.division is not None:
        how.division.read_dtype(None, outline.dtype)
    return load_gguf_model(
        path,
        outline.config,
        outline.dtype,
        keeps_bits=keeps_bits,
        device=_codes_on(outline.device),
    )


def tokenizer_of(outline: ModelConfig) -> tuple[Tokenizer, frozenset[int]]:
    """Return a checkpoint's tokenizer, and the tokens that end an answer. Raises ModelError."""
    path = Path(outline.source)
    if path.is_file():
        return load_gguf_tokenizer(path)
    tokenizer = load_tokenizer(path, trust_remote_code=outline.trust_remote_code)
    own_id = tokenizer.eos_token_id
    return tokenizer, generation_of(outline).end_ids.union(() if own_id is None else (own_id,))


def rowless_ends(end_ids: frozenset[int], vocab_size: int) -> dict[int, str]:
    """Return the end tokens that a model has no row for, each with a sentence for the operator."""
    told = f"has no row of {vocab_size}; it ends no answer"
    rowless = sorted(each for each in end_ids if not 0 <= each < vocab_size)
    return {each: f"the tokenizer's end token {each} {told}" for each in rowless}


def _codes_on(device: torch.device) -> torch.device | None:
    """Return the device of weights as codes; None: a CPU's kernels read panels."""
    return None if has_cpu_kernels(device) else device


def _quantised(model: nn.Module, tokenizer: Tokenizer, how: _How) -> dict[str, Any]:
    """Quantise a loaded model if that is asked for; return the fields of Checkpoint about it."""
    distance = None
    if how.weights == "int8":
        how.on_phase("quantising weights to int8")
        distance = quantise_model(model, tokenizer)
    found = storage_of(model)
    found.is_rounding = how.activations == "int8"
    return {"low_bits": found, "distance": distance} if found.by_format else {}


def _gguf_phase(
    file_bytes: int, num_parameters: int, dtype: torch.dtype, *, keeps_bits: bool
) -> str:
    """Return the words for the reading of a GGUF file."""
    if keeps_bits:
        return f"reading {size_text(file_bytes)} of GGUF"
    loaded, name = size_text(num_parameters * dtype.itemsize), str(dtype).removeprefix("torch.")
    return f"dequantising {size_text(file_bytes)} of GGUF to {loaded} of {name}"


def prepare_model(
    model: nn.Module,
    tokenizer: Tokenizer,
    eos_token_ids: frozenset[int],
    sampling_defaults: Mapping[str, float],
    on_phase: OnPhase = no_phases,
    *,
    activations: Activations = "exact",
    exact_batches: bool = False,
    division: Division | None = None,
    memory: CheckMemory | None = None,
) -> Checkpoint:
    """Patch a loaded model in place and check it. Raises ModelError.

    `exact_batches`: a row has the same bits in any batch on a GPU, too, or the model is refused.
    A model that is divided is compared with the whole one, as any other is. `memory`: what an
    earlier check of the same prompts found counts, and other bits raise OtherBitsError.
    """
    parameter = next(model.parameters())
    make_current(parameter.device)  # trials launch kernels
    native = read_native_rope(model)
    is_ruled = rule_experts(model, division)
    on_phase("checking the model")
    text_ids = text_ids_of(model, tokenizer)
    ids = prompt_ids(model, text_ids)
    known = None if memory is None else memory.of(ids)
    _log.info("self_check", model=type(model).__name__, known=known is not None)
    check = known or FullCheck(model, native, ids, text_ids)
    plans, states = patch_with_states(model, native)
    check.compare_structure(model, plans, states)
    if division is not None:
        division.divide(model)
        plans = plans_of_part(model, plans)
    program, forward = None, None
    if has_cpu_kernels(parameter.device):
        program = pack(model, plans, division, is_ruled=is_ruled)
    else:
        if not exact_batches:
            choose_products(model, keeps_fp8=activations == "fp8")
        forward = _gpu_forward(model, plans, division, exact_batches=exact_batches)
    paged_prompts = partial(PagedPrompts, model, plans, native, ids, states=states)
    exact_batches = exact_batches and has_gpu_kernels(parameter.device)  # a CPU's always are
    if exact_batches:
        paged_prompts = partial(paged_prompts, exact_batches=True)
    check.compare_products(paged_prompts)
    if activations != "exact":
        on_phase(f"rounding activations to {activations}")
        check.round_rows(model, activations)
    if program is not None:
        forward = decoder_of(model, plans, program)
    is_installed = forward is not None and check.install(model, forward)
    report = check.report
    if exact_batches:
        _refuse_other_bits(paged_prompts(), is_installed=is_installed)
        report = replace(report, bitwise=True)
    served = paged_prompts()
    digest, scales = served.digest(), served.scales()
    if memory is not None and (is_installed or forward is None):  # else the next start tries again
        memory.conclude(check, ids, digest, has_program=is_installed)
    vocab_size = text_config(model).vocab_size
    rowless = rowless_ends(eos_token_ids, vocab_size)
    return Checkpoint(
        model,
        plans,
        native,
        tokenizer,
        eos_token_ids.difference(rowless),
        sampling_defaults,
        vocab_size,
        parameter.dtype,
        parameter.device,
        report,
        _products(model, exact_batches=exact_batches),
        states=states,
        rounding=check.rounding,
        left_out=tuple(rowless.values()),
        scales=scales,
        exact_batches=exact_batches,
    )


def _products(model: nn.Module, *, exact_batches: bool) -> str:
    """Return how a prepared model's weights lie and are multiplied, for the banner."""
    parameter = next(model.parameters())
    if has_cpu_kernels(parameter.device):
        return products_text(model, parameter.dtype)
    few_bits = stored_products_text(model)
    return exact_products(has_few_bits=bool(few_bits)) if exact_batches else few_bits or BY_TORCH


def _gpu_forward(
    model: nn.Module,
    plans: Mapping[int, LayerPlan],
    division: Division | None,
    *,
    exact_batches: bool,
) -> Any:
    """Return the list of launches of a model without a CPU's kernels; None if it has none.

    Such a model has other norms, in place.
    """
    parameter = next(model.parameters())
    if division is not None or not has_gpu_kernels(parameter.device):
        if division is not None:
            division.note_products(model, parameter.dtype, parameter.device)
        replace_norms(model)
        return None
    # These import triton.
    from ropewalk.model_runtime.gpu.program.flat_forward import flat_forward  # noqa: PLC0415
    from ropewalk.model_runtime.gpu.rms_norm import candidates  # noqa: PLC0415

    if exact_batches:
        from ropewalk.model_runtime.gpu.exact.forward import exact_forward  # noqa: PLC0415

        return exact_forward(model, plans)
    forward = flat_forward(model, plans)
    if forward is None:
        replace_norms(model, candidates)
    return forward


def _refuse_other_bits(prompts: PagedPrompts, *, is_installed: bool) -> None:
    """Raise ModelError if a GPU does not keep what exact_batches promises."""
    if not (is_installed and has_same_bits(prompts)):
        raise ModelError(
            f"exact_batches is not served for {type(prompts.model).__name__} on this GPU: the "
            "self-check found other logits than those of its modules, or other bits in another "
            "batch"
        )


def _load_model(
    outline: ModelConfig,
    dtype: torch.dtype,
    *,
    keeps_bits: bool,
    device: torch.device | None,
) -> Any:
    source, trust_remote_code = outline.source, outline.trust_remote_code
    with logged_progress():
        if outline.stored is not None:
            from ropewalk.model_runtime.loading.files.quantised_checkpoint import (  # noqa: PLC0415  # only for such a checkpoint
                load_quantised,
            )

            model, info = load_quantised(
                source,
                outline.config,
                outline.stored,
                dtype,
                trust_remote_code=trust_remote_code,
                keeps_bits=keeps_bits,
                device=device,
            )
        else:
            model, info = from_pretrained(
                factory_of(outline.config),
                source,
                dtype=dtype,
                use_safetensors=True,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                generation_config=GenerationConfig(),  # its file has another reader
                adapter_kwargs=NO_ADAPTER,
            )
    missing = sorted(info["missing_keys"])
    if missing:
        raise ModelError(f"{source} lacks {len(missing)} weights, the first is {missing[0]}")
    unused = sorted(info["unexpected_keys"])
    if unused:
        # Often harmless (a head that is not served), but the config may have too few layers.
        _log.warning("weights_unused", count=len(unused), first=unused[0])
    mismatched = sorted(str(each) for each in info.get("mismatched_keys", ()))
    if mismatched:
        raise ModelError(f"{source} has weights of another shape: {mismatched[0]}")
    for name, parameter in model.named_parameters():
        if not bool(parameter.isfinite().all()):
            raise ModelError(f"{source}: weight {name} has NaN or Inf")
    return model
