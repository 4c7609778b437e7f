"""The check changes nothing; a faster forward is kept only if it agrees with the plain one."""

from collections.abc import Sequence
from typing import Any

import pytest
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.loading.self_check import check
from ropewalk.model_runtime.runner.model_runner import ModelRunner
from tests.doubles.engines import tiny_checkpoint
from tests.model_runtime.loading.test_patch_model import patched


def state(model: Any) -> list[tuple[str, int, Any, Any]]:
    """Each module with its forward and its window, if it has its own."""
    return [
        (name, id(module), vars(module).get("forward"), vars(module).get("sliding_window"))
        for name, module in model.named_modules()
    ]


@pytest.mark.parametrize("architecture", ["llama", "gemma3_text"])
def test_the_check_changes_nothing(architecture: str) -> None:
    """Modules, forwards and windows are those from before."""
    prompts, original = patched(architecture)
    before = state(prompts.model), prompts.model.config.to_dict()
    check(prompts, original)
    assert (state(prompts.model), prompts.model.config.to_dict()) == before


def test_the_plain_forward_of_the_long_prompt_runs_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check and both choices share its logits; that of the structure has two of its own."""
    wholes = []
    original = ModelRunner.run

    def counted(runner: ModelRunner, spans: Sequence[Span], *rest: Any) -> Tensor:
        if len(spans) == 1 and len(spans[0].logit_rows) == 48:
            wholes.append((spans[0].table_id, "forward" in vars(runner._model)))
        return original(runner, spans, *rest)

    monkeypatch.setattr(ModelRunner, "run", counted)
    tiny_checkpoint("llama")
    # Plain and scaled, for the structure and for the weights; then fused.
    assert wholes == [(0, False), (1, False), (0, False), (1, False), (0, True)]
