"""Checkpoints with towers for images or sound: their text answers as in the whole model."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL, read_model_config
from ropewalk.model_runtime.loading.notes import notes_of
from tests.checkpoints.quantised_cases import CASES
from tests.checkpoints.tiny_models import randomised, tiny_config
from tests.doubles.engines import EngineFactory, answer, deployment_of, request
from tests.doubles.tokens import byte_tokenizer_fast

# Architecture -> the names under which transformers saves it, as the published checkpoints have
# them: a weight of the text, the tower, and the parts that are left out.
PUBLISHED = {
    "qwen2_5_vl": ("model.layers.0.", "visual.", ("visual",)),
    "qwen3_vl_moe": ("model.language_model.layers.0.", "model.visual.", ("visual",)),
    "llava": (
        "language_model.model.layers.0.",
        "vision_tower.",
        ("vision_tower", "multi_modal_projector"),
    ),
    "qwen3_5": ("model.language_model.layers.0.", "model.visual.", ("visual",)),
    "gemma3": (
        "language_model.model.layers.0.",
        "vision_tower.",
        ("vision_tower", "multi_modal_projector"),
    ),
}


def whole_model(architecture: str) -> PreTrainedModel:
    """A tiny random model with its towers, as transformers makes it."""
    torch.manual_seed(0)
    config = tiny_config(architecture)
    return randomised(MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)](config))


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """Write a model with a tokenizer."""
    model.save_pretrained(folder)
    byte_tokenizer_fast().save_pretrained(folder)
    return folder


def num_text_parameters(whole: PreTrainedModel, left_out: tuple[str, ...]) -> int:
    """The parameters that are not in the parts which are left out."""
    counted = {name.removeprefix("model."): each.numel() for name, each in whole.named_parameters()}
    return sum(each for name, each in counted.items() if not name.startswith(left_out))


def check_answers_as(
    whole: PreTrainedModel, checkpoint: Checkpoint, engines: EngineFactory
) -> None:
    """Assert that the log-probabilities of a prompt are those of the whole model."""
    ids = [7 * index % 199 for index in range(60)]
    prompt = request(deployment_of(checkpoint), ids, max_tokens=1, prompt_logprobs=0)
    (result,) = answer(engines.over(checkpoint), prompt)
    with torch.inference_mode():
        logits_TV = whole(input_ids=torch.tensor([ids]), use_cache=False).logits[0].double()
    expected_T = logits_TV.log_softmax(-1)[torch.arange(59), ids[1:]]
    found_T = torch.tensor(result.prompt_logprob_values(), dtype=torch.float64)
    assert torch.allclose(found_T, expected_T, atol=2e-4)


@pytest.mark.parametrize("architecture", sorted(PUBLISHED))
def test_the_text_of_a_published_form_answers_as_the_whole_model(
    architecture: str, engines: EngineFactory, tmp_path: Path
) -> None:
    """Log-probabilities of a prompt are those of the whole model; no tower is read or counted."""
    text, tower, left_out = PUBLISHED[architecture]
    whole = whole_model(architecture)
    folder = saved(whole, tmp_path)
    with safe_open(folder / "model.safetensors", framework="np") as file:
        names = list(file.keys())
    assert all(any(name.startswith(prefix) for name in names) for prefix in (text, tower))
    outline = read_model_config(folder)
    assert outline.left_out == left_out
    (note,) = notes_of(outline)
    assert note.startswith(f"served for text only: {' and '.join(left_out)} ")
    checkpoint = load_checkpoint(folder)
    assert checkpoint.report.bitwise
    assert checkpoint.left_out == notes_of(outline)
    assert outline.native() == checkpoint.native
    assert outline.num_parameters() == num_text_parameters(whole, left_out)
    check_answers_as(whole, checkpoint, engines)


@pytest.mark.parametrize("architecture", ["qwen3_5", "qwen3_vl"])
def test_a_quantised_form_answers_as_its_whole_model(
    architecture: str, engines: EngineFactory, tmp_path: Path
) -> None:
    """The text's weights are in FP8, and its tower is in bfloat16, as in Qwen3.5-*-FP8."""
    case = next(each for each in CASES if each.name == "fp8-blocks")
    written = case.write(tmp_path / "fp8", whole_model(architecture))
    names = [name for name in written.tensors if name.endswith("_scale_inv")]
    assert names
    assert all("language_model" in name for name in names)
    outline = read_model_config(written.folder)
    assert outline.left_out == ("visual",)
    checkpoint = load_checkpoint(written.folder)
    written.write_plain(tmp_path / "plain", torch.float32)
    kind = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(outline.config)]
    whole = kind.from_pretrained(tmp_path / "plain", dtype=torch.float32)
    assert outline.num_parameters() == num_text_parameters(whole, outline.left_out)
    check_answers_as(whole.eval(), checkpoint, engines)


def test_a_model_that_continues_no_text_is_refused_by_its_class(tmp_path: Path) -> None:
    """No weight is read for it."""
    folder = Path(shutil.copytree(EMBEDDED_MODEL, tmp_path / "model"))
    values = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}
    (folder / "config.json").write_text(json.dumps(values))
    told = (
        r"T5ForConditionalGeneration \(model_type t5\) is no model in transformers that continues"
    )
    with pytest.raises(ModelError, match=told):
        read_model_config(folder)
