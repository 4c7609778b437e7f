"""The embedded model as GGUF in three number types, served over HTTP."""

import json
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Type
from transformers import AutoModelForCausalLM, AutoTokenizer

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.checkpoints.gguf_files import (
    Encode,
    config_metadata,
    file_tensors,
    quantised,
    write_file,
)
from tests.checkpoints.k_quants import q4_k
from tests.servers.processes import run_here, running_server

PROMPTS = ("def area(width, height):\n", "import os\n\nfor name in ", "class Stack:\n    ")
NUM_TOKENS = 24


def as_q4_k(_: str, values: np.ndarray) -> tuple[np.ndarray, Type]:
    """Q4_K for rows of a multiple of 256; Q5_0 for others, as llama.cpp falls back."""
    if values.ndim == 1:
        return values, Type.F32
    if values.shape[-1] % 256 == 0:
        return q4_k(values), Type.Q4_K
    return gguf.quants.quantize(values, Type.Q5_0), Type.Q5_0


ENCODINGS: dict[str, Encode] = {
    "F16": quantised(Type.F16),
    "Q8_0": quantised(Type.Q8_0),
    "Q4_K": as_q4_k,
}


def embedded_tokenizer() -> dict[str, Any]:
    """The metadata of the embedded model's tokenizer, as converters write it."""
    stated = json.loads((EMBEDDED_MODEL / "tokenizer.json").read_text())
    vocabulary = stated["model"]["vocab"]
    special = {token["content"] for token in stated["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",  # digits one by one, then words as in GPT-2
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in special else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in stated["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": (EMBEDDED_MODEL / "chat_template.jinja").read_text(),
    }


def write_embedded(path: Path, encode: Encode) -> Path:
    """Write the embedded model to a file."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    metadata = config_metadata("llama", model.config) | embedded_tokenizer()
    metadata["llama.rope.dimension_count"] = 64
    tensors = file_tensors(model, "llama", permuted=True, norm_offset=0.0)
    return write_file(path, metadata, tensors, encode)


def expected_texts(encode: Encode) -> list[str]:
    """Transformers' greedy answers with the weights that the file holds."""
    model = AutoModelForCausalLM.from_pretrained(EMBEDDED_MODEL, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            stored, kind = encode(name, parameter.numpy())
            parameter.copy_(torch.from_numpy(gguf.quants.dequantize(stored, kind)))
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    texts = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt")
        answer = model.generate(**ids, do_sample=False, max_new_tokens=NUM_TOKENS)
        new_ids = answer[0, ids["input_ids"].shape[1] :]
        texts.append(tokenizer.decode(new_ids, skip_special_tokens=True))
    return texts


# Q4_K and its fallback are compiled for fifteen seconds. Their values are tested in
# test_low_bit_products.py, and models with Q4_K in test_low_bit_experts.py.
@pytest.mark.parametrize("name", ["F16", "Q8_0", pytest.param("Q4_K", marks=pytest.mark.long)])
def test_a_served_file_writes_what_transformers_writes_with_its_weights(
    name: str, tmp_path: Path
) -> None:
    """Greedy text over HTTP, tokens and a rendered chat, for each number type."""
    write_embedded(tmp_path / f"embedded.{name}.gguf", ENCODINGS[name])
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    flags = ("--kv-cache-tokens", "2048", "--dtype", "float32", "--activations", "exact")
    with running_server(str(tmp_path), *flags) as server:
        if name == "F16":
            assert "dequantising_gguf" in server.banner
            assert "loaded_bytes=" in server.banner
        else:
            assert "reading_gguf" in server.banner
            assert "the values of the file" in server.banner
        with httpx.Client(base_url=server.url, timeout=60) as client:
            (model,) = client.get("/v1/models").json()["data"]
            texts = []
            for prompt in PROMPTS:
                body = {"model": model["id"], "prompt": prompt, "temperature": 0}
                answer = client.post("/v1/completions", json={**body, "max_tokens": NUM_TOKENS})
                texts.append(answer.json()["choices"][0]["text"])
            text = "x = 12345 # né 日本 😀\n\n\tpass  "
            tokens = client.post("/tokenize", json={"prompt": text}).json()["tokens"]
            messages = [{"role": "user", "content": "hi"}]
            chat = {"model": model["id"], "messages": messages, "max_tokens": 1}
            usage = client.post("/v1/chat/completions", json=chat).json()["usage"]
    assert texts == expected_texts(ENCODINGS[name])
    assert tokens == tokenizer(text)["input_ids"]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert usage["prompt_tokens"] == len(rendered["input_ids"])


def test_config_check_and_inspect_read_the_metadata_only(tmp_path: Path) -> None:
    """Both report the file's model, its size in the served type, and its native length."""
    path = write_embedded(tmp_path / "small.gguf", ENCODINGS["Q8_0"])
    (tmp_path / "settings.yaml").write_text(f"model: {path}\nkv_cache_tokens: 2048\n")
    checked = run_here("config", "check", str(tmp_path / "settings.yaml"))
    assert checked.returncode == 0, checked.stderr
    assert "LlamaForCausalLM, cpu, float32" in checked.stdout
    assert "deployment       small" in checked.stdout
    assert "native length  256 tokens" in checked.stdout
    inspected = run_here("inspect", str(path), "--json", "--device", "cpu")
    assert inspected.returncode == 0, inspected.stderr
    embedded = run_here("inspect", "--json", "--device", "cpu")
    costs, own = json.loads(inspected.stdout)["costs"], json.loads(embedded.stdout)["costs"]
    # The embedded model has settings of its own for its longest context.
    own |= {"file_bytes": path.stat().st_size, "file_types": "Q8_0, F32", "low_bits": "int8"}
    # Eight bits and a half.
    assert costs.pop("weight_bytes") < 0.3 * own.pop("weight_bytes")
    assert costs.pop("tied_head_bytes") == 0 < own.pop("tied_head_bytes")
    others = {"longest_context": 0, "longest_context_bytes": 0}
    assert {**costs, **others} == {**own, **others}
    assert "of GGUF, Q8_0, F32)" in checked.stdout
