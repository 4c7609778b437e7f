"""GGUF files of small mixtures whose experts have few bits."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from tests.checkpoints.gguf_cases import CASES
from tests.checkpoints.gguf_files import Written
from tests.checkpoints.random_blocks import like

# A file, and the types of gate, up and down; llama-quantize gives half of the downs of Q4_K_M six
# bits. A set of several types takes up to a minute to compile.
FILES = [
    pytest.param("qwen3moe", ("Q4_K", "Q4_K", "Q6_K"), marks=pytest.mark.long),
    ("mixtral", ("Q8_0", "Q8_0", "Q8_0")),
    pytest.param("qwen3moe", ("Q4_K", "Q5_K", "MXFP4"), marks=pytest.mark.long),
    pytest.param("mixtral", ("Q5_0", "IQ4_NL", "Q4_1"), marks=pytest.mark.long),
]


def expert_file(path: Path, types: tuple[str, str, str], *, case: str, width: int) -> Path:
    """A file with experts in these types, and all else in floats."""
    found = next(each for each in CASES if each.name == case)
    own = {"hidden_size": 256, "head_dim": 64, "intermediate_size": width}
    own |= {"num_experts": 8, "num_local_experts": 8}
    if case == "qwen3moe":
        own |= {"moe_intermediate_size": width}
    found = replace(found, overrides={**found.overrides, **own})
    by_name = dict(zip(("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"), types, strict=True))

    def encode(name: str, values: np.ndarray) -> tuple[np.ndarray, Type]:
        chosen = next((each for key, each in by_name.items() if key in name), None)
        if chosen is None or chosen == "F32":
            return values, Type.F32
        rows = like(values.reshape(-1, values.shape[-1]), chosen, len(name))
        return rows.reshape(*values.shape[:-1], -1), Type[chosen]

    return found.write(path, Written(encode=encode))
