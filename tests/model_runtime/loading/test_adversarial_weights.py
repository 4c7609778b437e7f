"""Models with the numbers of trained weights load, and answer as transformers does.

Shapes: T = tokens of a prompt, V = vocabulary.
"""

import copy
import random
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from ropewalk.model_runtime.attention.batch import Span
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.engine.build_engine import build_runner
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, prepare_model
from ropewalk.model_runtime.state_shape import StatePart
from ropewalk.rope import Profile
from tests.checkpoints.adversarial_weights import (
    KINDS,
    Change,
    adversarial,
    empty_embeddings,
    norms_with_zeros,
    outlier_rows,
)
from tests.checkpoints.tiny_models import VOCAB_SIZE
from tests.doubles.tokens import byte_tokenizer
from tests.models_page import OUTSIDE, SERVED

_PAGE = 16
_TIMES_ROUNDING = 30.0  # of transformers' own distance from float64
_MIN_SHARE = {torch.float32: 2e-5, torch.bfloat16: 5e-2}  # of the logits' standard deviation
# Named cases of trained checkpoints, each of which was refused once.
KNOWN = [
    (norms_with_zeros, "gemma3_text"),
    (norms_with_zeros, "qwen3"),
    (empty_embeddings, "llama"),
    (empty_embeddings, "gemma2"),
    (outlier_rows, "qwen2"),
    (outlier_rows, "granite"),
    (outlier_rows, "mixtral"),
]
# Fused, in layers with windows, interleaved, with experts, with latent attention.
FORMS = ("llama", "gemma3_text", "cohere2", "qwen3_moe", "deepseek_v3")


class Served:
    """The steps of a loaded model over its cache."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = EngineConfig(kv_cache_tokens=256, max_model_len=64, page_size=_PAGE)
        self.runner = build_runner(checkpoint, config)
        native = checkpoint.native
        self._has_states = bool(checkpoint.states)
        self._table = self.runner.table_id(Profile(native.tables[native.scaled_layer_type].scaling))

    def span(self, ids: list[int], sequence: int) -> Span:
        """A whole prompt."""
        pages = range(4 * sequence, 4 * sequence + 4)
        parts = (StatePart(len(ids), None, sequence),) if self._has_states else ()
        return Span(ids, 0, pages, self._table, range(len(ids)), parts)


def _lowest_of_equals(scores: Tensor, k: int, dim: int = -1, **_: Any) -> tuple[Tensor, Tensor]:
    """`torch.topk` with our rule for ties, which large norms make where a sigmoid is 1."""
    values, indices = scores.sort(dim=dim, descending=True, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


@torch.inference_mode()
def _logits(model: Any, ids: list[int], *, has_our_ties: bool) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        if has_our_ties:
            patch.setattr(torch, "topk", _lowest_of_equals)
            patch.setattr(Tensor, "topk", _lowest_of_equals)
        logits_TV: Tensor = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    return logits_TV.double()


def check_served(architecture: str, seed: int, kinds: tuple[Change, ...] = ()) -> None:
    """Load a model, compare it with transformers, and its prompts alone with those in a batch."""
    drawn = adversarial(architecture, seed, kinds)
    untouched = copy.deepcopy(drawn.model)
    has_experts = any("expert" in name for name, _ in untouched.named_modules())
    has_our_ties = architecture not in OUTSIDE
    rng = random.Random(seed)
    prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(count)] for count in (23, 9, 17)]
    expected = [_logits(untouched, ids, has_our_ties=has_our_ties) for ids in prompts]
    untouched.set_experts_implementation("eager")  # the others take no float64
    untouched.double()
    exact = [_logits(untouched, ids, has_our_ties=has_our_ties) for ids in prompts]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        checkpoint = prepare_model(drawn.model, byte_tokenizer(), frozenset(), {})
    served = Served(checkpoint)
    spans = [served.span(ids, index) for index, ids in enumerate(prompts)]
    together = served.runner.run(spans).split([len(ids) for ids in prompts])
    alone = [served.runner.run([span]) for span in spans]
    for one_TV, shared_TV, expected_TV, exact_TV in zip(
        alone, together, expected, exact, strict=True
    ):
        assert torch.equal(one_TV, shared_TV), drawn.kinds
        allowed = max(
            _TIMES_ROUNDING * float((expected_TV - exact_TV).abs().max()),
            _MIN_SHARE[drawn.dtype] * float(exact_TV.std()),
        )
        apart_T = (one_TV - exact_TV).abs().amax(-1)
        # Rounding may decide for another expert. In bfloat16 it may decide for another key, if an
        # outlier makes a softmax choose one.
        share = 0.75 if has_experts or drawn.dtype == torch.bfloat16 else 1.0
        assert float(apart_T.quantile(share)) <= allowed, drawn.kinds
    assert checkpoint.report.bitwise


@pytest.mark.parametrize(
    ("kind", "architecture"), KNOWN, ids=lambda each: getattr(each, "__name__", each)
)
def test_numbers_of_trained_checkpoints_do_not_refuse_a_model(
    kind: Change, architecture: str
) -> None:
    """Zeros in norms, embeddings of zero and outliers say nothing about the structure."""
    check_served(architecture, 0, (kind,))


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_every_kind_of_numbers_is_served(kind: Change) -> None:
    """Each kind in one of the forms of a layer; a third is in bfloat16."""
    architecture = FORMS[KINDS.index(kind) % len(FORMS)]
    check_served(architecture, 3 + KINDS.index(kind), (kind,))


@pytest.mark.long
@pytest.mark.parametrize("architecture", SERVED)
def test_every_architecture_is_served_with_drawn_numbers(architecture: str) -> None:
    """Float32 and bfloat16, one to three kinds each."""
    for seed in range(2):
        check_served(architecture, 2 * SERVED.index(architecture) + seed)
