"""Quantised checkpoints are loaded with the weights that a reference reads in the same files."""

from pathlib import Path
from typing import Any

import pytest
import torch

from model_runtime.loading.checkpoint import load_checkpoint
from model_runtime.loading.model_config import read_model_config
from model_runtime.loading.quantised_checkpoint import load_quantised
from tests.engines import EngineFactory, answer, deployment_of, request
from tests.quantised_cases import CASES
from tests.quantised_files import Case

DTYPES = (torch.float32, torch.bfloat16)


def loaded(folder: Path, dtype: torch.dtype) -> Any:
    """The model of transformers as it is before it is patched."""
    name = str(dtype).removeprefix("torch.")
    outline = read_model_config(folder, dtype=name, device="cpu")
    assert outline.stored is not None
    model, info = load_quantised(
        folder, outline.config, outline.stored, dtype, trust_remote_code=False
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    return model


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_those_of_the_reference_to_the_bit(
    case: Case, dtype: torch.dtype, tmp_path: Path
) -> None:
    """The files are of one format each; other tensors are as they would be without it."""
    written = case.write(tmp_path / "quantised")
    expected = written.dequantised(tmp_path / "plain", dtype).state_dict()
    found = loaded(written.folder, dtype).state_dict()
    assert list(found) == list(expected)
    for name, tensor in found.items():
        assert tensor.dtype == dtype, name
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_greedy_tokens_are_those_of_the_dequantised_model(
    case: Case, engines: EngineFactory, tmp_path: Path
) -> None:
    """The reference is transformers' generate on the unquantised checkpoint."""
    written = case.write(tmp_path / "quantised")
    untouched = written.dequantised(tmp_path / "plain", torch.float32)
    checkpoint = load_checkpoint(written.folder, dtype="float32", device="cpu")
    assert str(checkpoint.stored) == case.described
    prompt = list(range(40, 52))
    engine, deployment = engines.over(checkpoint), deployment_of(checkpoint)
    result = answer(engine, request(deployment, prompt, max_tokens=16, ignore_eos=True))[0]
    generated = untouched.generate(
        torch.tensor([prompt]),
        max_new_tokens=16,
        do_sample=False,
        pad_token_id=1,
        eos_token_id=None,
    )
    assert [*prompt, *result.token_ids] == generated[0].tolist()
