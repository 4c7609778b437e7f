"""Patch a transformers model so that its own forward passes on unrotated queries and keys.

Every rotary module is replaced by one that returns the identity rotation. Probing the model, not a
list of names, shows which layers rotate, their width, their pairing and their table. With
cos = sin = 0, exactly the rotated dimensions of a layer's queries are zero. With cos = 0 and
sin = 1, the two dimensions of every pair are exchanged, which shows the pairs.

Then the layers skip the identity rotation (skip_rotation.py), if their queries and keys are the
same without it. Only the sign of a zero may differ, because -0 + 0 is 0.

Shapes: H = query heads, K = key heads, T = tokens of the probe, D = key dimensions.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ropewalk.model_runtime.attention.paged_attention import (
    IMPLEMENTATION,
    STEP,
    AttentionCall,
    AttentionContext,
    LayerPlan,
    StepMissingError,
    register,
)
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers.replace_modules import Replacement
from ropewalk.model_runtime.layers.skip_rotation import restore_rotation, spare_rotation
from ropewalk.model_runtime.layers.states.take_over import take_states
from ropewalk.model_runtime.loading.config_values import (
    refuse_states_elsewhere,
    state_shapes,
    text_values,
)
from ropewalk.model_runtime.probing.probe import are_equal, recorded_calls, text_config
from ropewalk.model_runtime.probing.untouched import rotary_modules
from ropewalk.model_runtime.runner.backends import (
    cpu_fault,
    has_cpu_kernels,
    state_kernels_for,
)
from ropewalk.model_runtime.state_shape import StateShape
from ropewalk.rope import ALL_LAYERS, NativeRope

# Carry the step to attention modules that their decoder layers call without keyword arguments.
#
# A step travels in the keyword arguments of a model's forward. In a few models (Nemotron,
# StableLM) the decoder layer receives them and calls its attention without them. There a hook of
# the model notes the step of the forward that runs, and a hook of each attention module adds it to
# the call. Other models have no hooks.

_Result = TypeVar("_Result")


class _Running:
    """The step of the forward that runs; a model runs one forward at a time."""

    def __init__(self) -> None:
        self._step: AttentionContext | None = None

    def begin(self, model: nn.Module, arguments: Any, named: dict[str, Any]) -> None:  # noqa: ARG002
        self._step = named.get(STEP)

    def end(self, *_: object) -> None:
        """Forget the step, which holds the tensors of a batch."""
        self._step = None

    def add(
        self,
        attention: nn.Module,  # noqa: ARG002
        arguments: Any,
        named: dict[str, Any],
    ) -> tuple[Any, dict[str, Any]]:
        return arguments, {STEP: self._step, **named}


def with_step_carried(model: nn.Module, run: Callable[[], _Result]) -> _Result:
    """Return what `run` returns, after hooks carry the step where a first try shows it missing.

    Raises ModelError if an attention module takes no keyword arguments, or for errors of `run`.
    """
    running, carried = _Running(), set[type[nn.Module]]()
    while True:
        try:
            return run()
        except StepMissingError as error:
            kind = error.attention
            modules = [module for module in model.modules() if type(module) is kind]
            if kind in carried or not all(_takes_keywords(module) for module in modules):
                raise
            if not carried:
                model.register_forward_pre_hook(running.begin, with_kwargs=True)
                model.register_forward_hook(running.end, always_call=True)
            carried.add(kind)
            for module in modules:
                module.register_forward_pre_hook(running.add, with_kwargs=True)


def _takes_keywords(module: nn.Module) -> bool:
    # Not its class: the forward of a layer with states is ours (take_over.py).
    parameters = inspect.signature(module.forward).parameters.values()
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)


class IdentityRotary(Replacement):
    """A replacement for a rotary module that returns cos = 1, sin = 0 in the original shape.

    A module that returns complex numbers (DeepSeek-V2) is replaced by one that returns
    cos + i sin. Other attributes are the original's: Granite SWA asks a module for its base.
    """

    def __init__(self, original: nn.Module, layer_types: tuple[str, ...], hidden_size: int) -> None:
        super().__init__(original)
        self.constants = dict.fromkeys(layer_types, (1.0, 0.0))  # layer type -> (cos, sin)
        example = torch.zeros(1, 1, hidden_size)
        tables = {
            name: _example_table(original, example, None if name == ALL_LAYERS else name)
            for name in layer_types
        }
        self._widths = {name: table.shape[-1] for name, table in tables.items()}
        self._is_complex = any(table.is_complex() for table in tables.values())

    def forward(
        self, x: Tensor, position_ids: Tensor, layer_type: str | None = None
    ) -> tuple[Tensor, Tensor] | Tensor:
        """Return cos and sin [1, T, width], constant at all positions; or one complex tensor."""
        name = layer_type or ALL_LAYERS
        shape = (1, position_ids.shape[-1], self._widths[name])
        if self._is_complex:
            number = torch.full((1, 1, 1), complex(*self.constants[name]), device=x.device)
            return number.expand(shape)
        cos, sin = self.constants[name]
        return x.new_full((1, 1, 1), cos).expand(shape), x.new_full((1, 1, 1), sin).expand(shape)


def _example_table(original: nn.Module, example: Tensor, layer_type: str | None) -> Tensor:
    """Return the cosines of one position, or its complex numbers."""
    arguments = () if layer_type is None else (layer_type,)
    position = torch.zeros(1, 1, dtype=torch.long)
    try:
        tables = original(example, position, *arguments)
    except IndexError:  # Qwen 3.5 of transformers 5.17 expects time, height and width
        tables = original(example, position.expand(3, 1, 1), *arguments)
    if isinstance(tables, Tensor) and tables.is_complex():
        return tables
    if not (isinstance(tables, tuple) and len(tables) == 2 and tables[0].shape == tables[1].shape):
        raise ModelError(f"{type(original).__name__} does not answer with a cosine and a sine")
    cosines: Tensor = tables[0]
    return cosines


def patch_model(model: nn.Module, native: NativeRope) -> Mapping[int, LayerPlan]:
    """Replace the rotary modules and the attention of `model` in place; return each layer's plan.

    Raises ModelError that names the obstacle.
    """
    register()
    hidden_size = text_config(model).hidden_size
    rotaries = []
    for name, (module, types) in rotary_modules(model).items():
        rotaries.append(IdentityRotary(module.cpu(), types, hidden_size))
        model.set_submodule(name, rotaries[-1])
    try:
        model.set_attn_implementation(IMPLEMENTATION)  # type: ignore[operator]
    except ValueError as error:
        raise ModelError(f"{type(model).__name__} cannot change its attention: {error}") from error
    plans = _probe(model, rotaries, native)
    _spare_rotation(model, plans)
    _check_temperature(model)
    return plans


def patch_with_states(
    model: nn.Module, native: NativeRope
) -> tuple[Mapping[int, LayerPlan], Mapping[int, StateShape]]:
    """Patch a model as `patch_model` does, and its layers with states; return also their shapes.

    Other models import no kernels of states. Raises ModelError that names the obstacle.
    """
    device = next(model.parameters()).device
    if not any(isinstance(each, nn.Conv1d) for each in model.modules()):
        return patch_model(model, native), {}
    kernels = state_kernels_for(device)
    if kernels is None:
        _refuse_states(model, device)
        return patch_model(model, native), {}
    states = take_states(model, kernels)
    plans = patch_model(model, native)
    if states and has_cpu_kernels(device):
        from ropewalk.model_runtime.layers.states.rowwise_functions import (  # noqa: PLC0415  # imports numba
            use_rowwise_functions,
        )

        use_rowwise_functions(model)
    return plans, states


def _refuse_states(model: nn.Module, device: torch.device) -> None:
    """Raise ModelError if a model has states, which need compiled kernels."""
    values = text_values(model.config)
    refuse_states_elsewhere(type(model).__name__, values, device)
    if state_shapes(values):
        raise ModelError(
            f"{type(model).__name__} has layers that keep a state of each sequence, which need the "
            f"compiled kernels of a CPU, and these fail: {cpu_fault()}"
        )


def _check_temperature(model: nn.Module) -> None:
    """Raise ModelError if a temperature by position is stated and the model has none."""
    block: Any = getattr(text_config(model), "rope_parameters", None) or {}
    beta = block.get("llama_4_scaling_beta")
    if beta:
        # The temperature rises at every multiple of the trained length.
        beyond = recorded_calls(model, block["original_max_position_embeddings"])
        if any(are_equal(call, beyond[index]) for index, call in recorded_calls(model).items()):
            raise ModelError(
                f"{type(model).__name__}: llama_4_scaling_beta: is {beta}, but queries are the "
                "same at every position"
            )


def plans_of_part(model: nn.Module, plans: Mapping[int, LayerPlan]) -> dict[int, LayerPlan]:
    """Return the plans of a patched model that was divided since, with the heads that it has."""
    calls = recorded_calls(model)
    return {
        index: replace(plan, num_key_heads=calls[index].key_1KTD.shape[1])
        for index, plan in plans.items()
    }


def _probe(
    model: nn.Module, rotaries: list[IdentityRotary], native: NativeRope
) -> dict[int, LayerPlan]:
    unturned = with_step_carried(model, lambda: recorded_calls(model))
    types = sorted({name for rotary in rotaries for name in rotary.constants})
    plans: dict[int, LayerPlan] = {}
    for layer_type in types:
        with _constants(rotaries, layer_type, (0.0, 0.0)):
            zeroed = recorded_calls(model)
        with _constants(rotaries, layer_type, (0.0, 1.0)):
            turned = recorded_calls(model)
        table = layer_type if layer_type in native.tables else ALL_LAYERS
        for index, call in unturned.items():
            plan = _plan(index, table, call, zeroed[index], turned[index])
            if plan.layer_type is None:
                plans.setdefault(index, plan)
            else:
                _check_width(plan, native)
                plans[index] = plan
    return plans


def _plan(
    index: int,
    layer_type: str,
    unturned: AttentionCall,
    zeroed: AttentionCall,
    turned: AttentionCall,
) -> LayerPlan:
    query_HTD, key_KTD = unturned.query_1HTD[0], unturned.key_1KTD[0]
    num_key_heads, _, key_dim = key_KTD.shape
    value_dim = unturned.value_1KTV.shape[-1]
    start, rotary_dim = _zeroed_range(index, query_HTD, zeroed.query_1HTD[0])
    if (start, rotary_dim) != _zeroed_range(index, key_KTD, zeroed.key_1KTD[0]):
        raise ModelError(f"layer {index} rotates queries and keys over different dimensions")
    if rotary_dim == 0:
        plan = LayerPlan(num_key_heads, key_dim, value_dim, None, 0, interleaved=False)
        return replace(plan, window=unturned.sliding_window)
    shape = num_key_heads, key_dim, value_dim, layer_type, rotary_dim
    pairs = (query_HTD, turned.query_1HTD[0]), (key_KTD, turned.key_1KTD[0])
    for interleaved in (False, True):
        plan = LayerPlan(*shape, interleaved, start, unturned.sliding_window)
        if all(_is_quarter_turn(*pair, plan) for pair in pairs):
            return plan
    raise ModelError(
        f"layer {index} pairs its rotary dimensions in a way that is not known, or changes them "
        "after it has rotated them"
    )


def _zeroed_range(index: int, plain_XTD: Tensor, zeroed_XTD: Tensor) -> tuple[int, int]:
    """Return the first dimension that is zero with cos = sin = 0, and the number of them."""
    is_zero_D = (zeroed_XTD == 0).flatten(0, 1).all(0) & (plain_XTD != 0).flatten(0, 1).any(0)
    zeroed = is_zero_D.nonzero().flatten().tolist()
    if zeroed and zeroed[-1] - zeroed[0] + 1 != len(zeroed):
        raise ModelError(f"layer {index} rotates dimensions that are not beside each other")
    return (zeroed[0], len(zeroed)) if zeroed else (0, 0)


def _is_quarter_turn(plain_XTD: Tensor, turned_XTD: Tensor, plan: LayerPlan) -> bool:
    """Return whether (a, b) became (-b, a) in every pair of the plan."""
    plain_XTD, turned_XTD = plan.in_cache_order(plain_XTD), plan.in_cache_order(turned_XTD)
    first, second = plain_XTD[..., : plan.rotary_dim].chunk(2, dim=-1)
    expected_XTD = torch.cat((-second, first), dim=-1)
    return torch.equal(turned_XTD[..., : plan.rotary_dim], expected_XTD)


def _check_width(plan: LayerPlan, native: NativeRope) -> None:
    table = native.tables[str(plan.layer_type)]
    if plan.rotary_dim != table.rotary.rotary_dim:
        raise ModelError(
            f"a layer rotates {plan.rotary_dim} dimensions, its config says "
            f"{table.rotary.rotary_dim}"
        )


def _spare_rotation(model: nn.Module, plans: Mapping[int, LayerPlan]) -> None:
    """Make layers skip the identity rotation, if their attention calls stay equal."""
    rotated = recorded_calls(model)
    layers = [each for each in model.modules() if getattr(each, "layer_idx", None) in plans]
    spared = spare_rotation(layers)
    unrotated = recorded_calls(model)
    if not all(are_equal(call, unrotated[index]) for index, call in rotated.items()):
        restore_rotation(spared)


@contextmanager
def _constants(
    rotaries: list[IdentityRotary], layer_type: str, constants: tuple[float, float]
) -> Iterator[None]:
    affected = [rotary for rotary in rotaries if layer_type in rotary.constants]
    for rotary in affected:
        rotary.constants[layer_type] = constants
    try:
        yield
    finally:
        for rotary in affected:
            rotary.constants[layer_type] = (1.0, 0.0)
