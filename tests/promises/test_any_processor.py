"""A model is served on every processor; a load that cannot work ends with a sentence."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ropewalk.model_runtime.attention.torch_backend import TorchAttention
from ropewalk.model_runtime.cpu_kernels import trials
from ropewalk.model_runtime.cpu_kernels.target import vectors
from ropewalk.model_runtime.deployments.make_deployment import make_deployment
from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.layers import packed_linear
from ropewalk.model_runtime.layers.fused.decoder import DecoderLayers
from ropewalk.model_runtime.layers.packed_product import Way, Workshop
from ropewalk.model_runtime.layers.way_trial import is_possible
from ropewalk.model_runtime.loading import checkpoint
from ropewalk.model_runtime.loading.load_faults import faults_of
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from ropewalk.model_runtime.runner import backends
from tests.checkpoints.tiny_models import in_dtype, tiny_model
from tests.doubles.engines import EngineFactory, answer, checkpoint_of, request
from tests.processors import OLDER

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", Way)
def test_a_model_has_the_same_bits_in_any_batch_with_every_way_to_multiply(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, way: Way
) -> None:
    """The self-check compares the bits over the compiled forward of all layers."""
    if (dtype, way) == (torch.float32, Way.STORED) or not is_possible(way, dtype):
        pytest.skip(f"no {way.name} of {dtype} on this processor or with this torch")
    monkeypatch.setattr(packed_linear, "workshop_for", lambda _: Workshop(way))
    adopted = checkpoint_of(in_dtype(tiny_model("llama"), dtype))
    assert adopted.report.bitwise
    assert adopted.products == way.value.format(str(dtype).removeprefix("torch."))
    assert isinstance(adopted.model.forward, DecoderLayers)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_serves_if_kernels_do_not_compile(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """The self-check decides without kernels too; the description says why the model is slow."""
    monkeypatch.setattr(trials, "kernel_fault", lambda: "LoweringError: no such vectors")
    assert backends.backend_for(CPU) is TorchAttention
    adopted = checkpoint_of(in_dtype(tiny_model("llama"), dtype))
    assert adopted.report.difference <= adopted.report.threshold
    assert adopted.products == "torch"
    assert "LoweringError: no such vectors" in backends.described(CPU)


def test_the_attention_is_described_by_its_vectors() -> None:
    """The banner shows the instruction set that the kernels were compiled for."""
    assert backends.described(CPU) == f"{vectors().name}, {vectors().lanes} lanes"


def test_whatever_a_load_raises_is_a_sentence_with_another_setting() -> None:
    """The error of a failed load names the number type, the device and the reason."""
    with (
        pytest.raises(ModelError, match=r"bfloat16 on device cpu: RuntimeError: no such path; try"),
        faults_of("my-model", torch.bfloat16, CPU),
    ):
        raise RuntimeError("no such path\nand a second line")
    with (
        pytest.raises(ModelError, match="there is no memory for it"),
        faults_of("my-model", torch.float32, CPU),
    ):
        raise MemoryError
    with pytest.raises(ModelError, match=r"^as it was$"), faults_of("x", torch.float32, CPU):
        raise ModelError("as it was")


@pytest.mark.parametrize("name", OLDER)
def test_an_older_processor_is_played_in_all_three_libraries(name: str) -> None:
    """Unless oneDNN, torch and numba obey their variables, `make test ISA=...` tests nothing."""
    code = (
        "import torch; from ropewalk.model_runtime.cpu_kernels.target import vectors;"
        "print(torch.backends.cpu.get_cpu_capability(), vectors().name, vectors().lanes);"
        "torch.nn.functional.linear(torch.ones(4, 8), torch.ones(8, 8));"
        "torch.ops.mkldnn._reorder_linear_weight(torch.ones(64, 64), 4096)"
    )
    older = OLDER[name]
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **older.environment, "ONEDNN_VERBOSE": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert older.seen in ended.stdout.splitlines()
    isa = [line for line in ended.stdout.splitlines() if "info,cpu,isa:" in line]
    assert isa, "oneDNN tells nothing"
    assert isa[0].endswith(older.isa)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_embedded_model_says_the_same_on_every_processor(
    engines: EngineFactory, dtype: torch.dtype
) -> None:
    """One prompt is within the trained length, the other reaches a tier with a scaled table."""
    loaded = checkpoint.load_checkpoint(EMBEDDED_MODEL, dtype=str(dtype).removeprefix("torch."))
    deployment = make_deployment("demo", loaded.native)
    encode = loaded.tokenizer.encode
    definition = encode("PORT_4821 = 93175\n")
    filler = encode(
        "".join(f"def step_{n}(items):\n    return items[{n}]\n\n\n" for n in range(40))
    )
    question = encode("\nprint(PORT_4821)  # -> ")
    prompts = ([*definition, *filler[:150], *question], [*definition, *filler[:350], *question])
    engine = engines.over(loaded)
    results = answer(engine, *(request(deployment, each, max_tokens=5) for each in prompts))
    assert [result.text for result in results] == ["93175", "93175"]
