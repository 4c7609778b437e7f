"""Carry the step to attention modules that their decoder layers call without keyword arguments.

A step travels in the keyword arguments of a model's forward. In a few models (Nemotron, StableLM)
the decoder layer receives them and calls its attention without them. There a hook of the model
notes the step of the forward that runs, and a hook of each attention module adds it to the call.
Other models have no hooks.
"""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from model_runtime.attention.paged_attention import STEP, Step, StepMissingError

_Result = TypeVar("_Result")


class _Running:
    """The step of the forward that runs; a model runs one forward at a time."""

    def __init__(self) -> None:
        self._step: Step | None = None

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
            if kind in carried or not _takes_keywords(kind):
                raise
            if not carried:
                model.register_forward_pre_hook(running.begin, with_kwargs=True)
                model.register_forward_hook(running.end, always_call=True)
            carried.add(kind)
            for module in model.modules():
                if type(module) is kind:
                    module.register_forward_pre_hook(running.add, with_kwargs=True)


def _takes_keywords(kind: type[nn.Module]) -> bool:
    parameters = inspect.signature(kind.forward).parameters.values()
    return any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters)
