"""What whole models are measured on: sizes, random weights made on the device, prompts, counts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from benchmarks.make_model import Shape, fill, llama_config
from model_runtime.config import EngineConfig
from model_runtime.deployment import Deployment
from model_runtime.loading.checkpoint import EMBEDDED_MODEL, Checkpoint, prepare_model
from model_runtime.loading.pretrained import load_tokenizer
from model_runtime.make_deployment import make_deployment

PAGE_SIZE = 64  # as served when nothing is said
_SEED = 7
_EMBEDDED_VOCAB = 2048  # tokens of the embedded tokenizer, which decodes the answers here


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSizes:
    """The server's model, and the load of `ropewalk bench`."""

    shape: Shape
    context_lens: tuple[int, ...]
    concurrencies: tuple[int, ...]  # a run of the load for each
    num_requests: int  # a length; at least as many as are in flight
    output_tokens: int
    most_s: float  # not begun with less time left


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """How much is measured. Lengths are in tokens."""

    shape: Shape
    native_len: int
    factor: float  # the longest tier, as a multiple of native_len
    dtype: torch.dtype
    cache_tokens: int
    chunk_len: int  # prompt tokens in a step, where nothing else is said
    batches: tuple[int, ...]  # decode: sequences at once
    prompt_len: int
    output_len: int
    rounds: int
    most_decode_s: float  # no further round of a batch is begun after so long
    prefill_len: int
    chunk_lens: tuple[int, ...]  # tried for that prompt
    contexts: tuple[int, ...]  # for the time to the first token
    most_repeated: int  # contexts up to here are measured in every round, longer ones once
    steps: tuple[tuple[int, int], ...]  # context, sequences: whole steps of every kind of cache
    num_steps: int  # timed in each of these
    crossed_ceiling: int  # of the tier that a growing sequence leaves
    server: ServerSizes
    compile_s: float  # transformers' compiling is not begun with less time left
    copy_bytes: int
    matrix: int
    repeats: int

    @property
    def longest(self) -> int:
        """Positions of the longest tier."""
        return round(self.native_len * self.factor)

    @property
    def layer_weights(self) -> int:
        """Numbers in the matrices of all layers."""
        shape = self.shape
        heads = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * shape.hidden
        return shape.layers * (heads + 3 * shape.hidden * shape.intermediate)

    @property
    def step_bytes(self) -> int:
        """Weights that a decode step reads: all but the embedding, of which it reads rows."""
        norms = (2 * self.shape.layers + 1) * self.shape.hidden
        head = self.shape.vocab * self.shape.hidden
        return (self.layer_weights + norms + head) * self.dtype.itemsize

    def prefill_operations(self, num_tokens: int) -> int:
        """Products and sums of a prompt: matrices, scores and outputs, one row of the head."""
        shape = self.shape
        seen = num_tokens * (num_tokens + 1) // 2
        attention = 4 * shape.layers * shape.heads * shape.head_dim * seen
        return 2 * self.layer_weights * num_tokens + attention + 2 * shape.vocab * shape.hidden

    def config(
        self, num_prefill_tokens: int, num_sequences: int, *, records: bool = True
    ) -> EngineConfig:
        """An engine's limits, with chunks of that many tokens of prompts.

        `records`: whether decode steps are recorded and replayed, on a GPU.
        """
        return EngineConfig(
            kv_cache_tokens=self.cache_tokens,
            max_model_len=self.longest,
            page_size=PAGE_SIZE,
            max_num_seqs=num_sequences,
            max_num_batched_tokens=num_prefill_tokens,
            enforce_eager=not records,
        )


LLAMA_3_8B = ModelSizes(
    shape=Shape(4096, 32, 32, 8, 14_336, 128_256, head_dim=128),
    native_len=8192,
    factor=16.0,
    dtype=torch.bfloat16,
    cache_tokens=139_264,
    chunk_len=8192,
    batches=(1, 64),
    prompt_len=128,
    output_len=256,
    rounds=3,
    most_decode_s=120.0,
    prefill_len=32_768,
    chunk_lens=(2048, 8192, 32_768),
    contexts=tuple(1024 * 2**power for power in range(8)),
    most_repeated=32_768,
    steps=((1024, 1), (32_768, 1), (2048, 64), (131_072, 1)),
    num_steps=64,
    crossed_ceiling=65_536,
    server=ServerSizes(
        shape=Shape(2048, 16, 32, 8, 8192, _EMBEDDED_VOCAB),  # 1.0 G parameters
        context_lens=(256, 1024, 4096, 16_384, 65_536),
        concurrencies=(1, 8),
        num_requests=4,
        output_tokens=64,
        most_s=150.0,
    ),
    compile_s=90.0,
    copy_bytes=4 * 2**30,
    matrix=8192,
    repeats=20,
)
# So small that a CPU gets through in seconds: whether it runs, not how fast.
TINY = ModelSizes(
    shape=Shape(64, 2, 4, 2, 128, _EMBEDDED_VOCAB, head_dim=16),
    native_len=64,
    factor=4.0,
    dtype=torch.float32,
    cache_tokens=1024,
    chunk_len=64,
    batches=(1, 3),
    prompt_len=12,
    output_len=6,
    rounds=1,
    most_decode_s=20.0,
    prefill_len=96,
    chunk_lens=(32, 96),
    contexts=(16, 64, 256),
    most_repeated=64,
    steps=((48, 1), (32, 3)),
    num_steps=5,
    crossed_ceiling=128,
    server=ServerSizes(
        shape=Shape(64, 2, 2, 1, 128, _EMBEDDED_VOCAB),
        context_lens=(32, 128),
        concurrencies=(2,),
        num_requests=2,
        output_tokens=4,
        most_s=0.0,
    ),
    compile_s=0.0,
    copy_bytes=2**16,
    matrix=64,
    repeats=1,
)


def random_model(
    shape: Shape, native_len: int, dtype: torch.dtype, device: torch.device
) -> LlamaForCausalLM:
    """Random weights in their own dtype, made where they stay: nothing wider, nothing copied."""
    model = _hollow(shape, native_len, dtype).to_empty(device=device)
    _give_tables(model, device)
    with torch.no_grad():
        fill(model, shape, torch.Generator(device=device).manual_seed(_SEED))
        # The tokenizer has no text for what lies above, so it is never the likeliest.
        model.lm_head.weight[_EMBEDDED_VOCAB:] = 0
    return model.eval()


def twin(model: LlamaForCausalLM, shape: Shape, native_len: int) -> LlamaForCausalLM:
    """Another model over the same weights in memory: one is taken over, one stays untouched."""
    weight = model.lm_head.weight
    other = _hollow(shape, native_len, weight.dtype)
    other.load_state_dict(model.state_dict(), assign=True)
    _give_tables(other, weight.device)
    return other.eval()


def _hollow(shape: Shape, native_len: int, dtype: torch.dtype) -> LlamaForCausalLM:
    """Names and shapes, no numbers."""
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(shape, native_len, dtype=dtype))
    return model.to(dtype)


def _give_tables(model: LlamaForCausalLM, device: torch.device) -> None:
    # Made on the CPU: a GPU's powers differ in the last bit, and the takeover compares bits.
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config).to(device)


def taken_over(model: LlamaForCausalLM) -> Checkpoint:
    """Checked and ready to serve; texts by the embedded model's tokenizer. Raises ModelError."""
    return prepare_model(model, load_tokenizer(EMBEDDED_MODEL), frozenset(), {})


def deployment_of(checkpoint: Checkpoint, sizes: ModelSizes) -> Deployment:
    """Yarn in tiers to the longest; growing."""
    scaling = {"rope_type": "yarn", "factor": sizes.factor}
    return make_deployment(
        "random", checkpoint.native, rope_scaling=scaling, policy="grow", answer_reserve_tokens=1
    )


class Prompts:
    """Random token ids; no two prompts begin alike, so none is found in a prefix cache."""

    def __init__(self, vocab: int) -> None:
        self._random = random.Random(_SEED)  # noqa: S311  # no secret
        self._ids = range(vocab)

    def of(self, num_tokens: int, count: int = 1) -> Sequence[list[int]]:
        """New ones."""
        return [self._random.choices(self._ids, k=num_tokens) for _ in range(count)]
