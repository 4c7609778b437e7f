"""The inputs of the whole-model benchmark: sizes, random weights, prompts, operation counts."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM, MistralConfig, MistralForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding

from benchmarks.models.llama import Shape, fill, llama_config
from ropewalk.model_runtime.config import EngineConfig
from ropewalk.model_runtime.deployments.deployment import Deployment
from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, prepare_model
from ropewalk.model_runtime.loading.files.pretrained import load_tokenizer
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL

PAGE_SIZE = 64  # the server's default
_SEED = 7
_EMBEDDED_VOCAB = 2048  # tokens of the embedded model's tokenizer, which decodes the answers


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSizes:
    """The server's model, and the load of `ropewalk bench`."""

    shape: Shape
    context_lens: tuple[int, ...]
    concurrencies: tuple[int, ...]  # one run of the load each
    num_requests: int  # per context length; if lower, the concurrency counts
    output_tokens: int
    most_s: float  # seconds that must be left at the start


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """The sizes of the measurements. Lengths are in tokens."""

    shape: Shape
    native_len: int
    factor: float  # the longest tier, as a multiple of native_len
    dtype: torch.dtype
    cache_tokens: int
    chunk_len: int  # default of prompt tokens in a step
    batches: tuple[int, ...]  # sequences that decode together
    contender_batches: tuple[int, ...]  # the same for transformers
    contender_s: float  # seconds that one of its ways may take
    prompt_len: int
    output_len: int
    rounds: int
    prefill_len: int
    chunk_lens: tuple[int, ...]  # measured with that prompt
    contexts: tuple[int, ...]  # whose time to the first token is measured
    most_repeated: int  # contexts up to here are measured in every round, longer ones once
    steps: tuple[tuple[int, int], ...]  # context, sequences; whole steps over every kind of cache
    num_steps: int  # steps timed in each of these
    crossed_ceiling: int  # ceiling of the tier that a growing sequence leaves
    server: ServerSizes
    short_prompts: tuple[tuple[int, int], ...]  # tokens, and those before them that are cached
    bursts: tuple[tuple[int, int], ...]  # prompt tokens, prompts sent together
    arrivals: tuple[int, float]  # requests, and seconds between two of them
    sampled: int  # sequences that decode together with other settings of sampling
    drafted: tuple[int, ...]  # sequences that decode together with drafts
    window: int  # of the model whose layers have one
    copy_bytes: int
    matrix: int
    warm_s: float  # seconds of products before their rates are measured
    sustained_s: float
    repeats: int

    @property
    def longest(self) -> int:
        return round(self.native_len * self.factor)

    @property
    def layer_weights(self) -> int:
        shape = self.shape
        heads = 2 * (shape.heads + shape.kv_heads) * shape.head_dim * shape.hidden
        return shape.layers * (heads + 3 * shape.hidden * shape.intermediate)

    @property
    def step_bytes(self) -> int:
        """Return the bytes of weights that a decode step reads.

        The embedding does not count, because a step reads only single rows of it.
        """
        norms = (2 * self.shape.layers + 1) * self.shape.hidden
        head = self.shape.vocab * self.shape.hidden
        return (self.layer_weights + norms + head) * self.dtype.itemsize

    def prefill_operations(self, num_tokens: int) -> int:
        """Return the multiplications and additions of a prompt.

        They are those of the matrices, of scores and outputs, and of one row of the LM head.
        """
        shape = self.shape
        seen = num_tokens * (num_tokens + 1) // 2
        attention = 4 * shape.layers * shape.heads * shape.head_dim * seen
        return 2 * self.layer_weights * num_tokens + attention + 2 * shape.vocab * shape.hidden

    def config(
        self, num_prefill_tokens: int, num_sequences: int, *, records: bool = True
    ) -> EngineConfig:
        """Build an engine's limits, with prompt chunks of `num_prefill_tokens`.

        `records`: whether decode steps are captured and replayed as CUDA graphs, on a GPU.
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
    batches=(1, 64, 128, 256),
    contender_batches=(1, 64),
    contender_s=60.0,
    prompt_len=128,
    output_len=256,
    rounds=3,
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
        concurrencies=(1, 8, 64),
        num_requests=4,
        output_tokens=64,
        most_s=150.0,
    ),
    short_prompts=((32, 0), (128, 0), (256, 0), (500, 0), (60, 1984)),
    bursts=((128, 64), (1000, 32), (3001, 8)),
    arrivals=(64, 0.05),
    sampled=64,
    drafted=(1, 8),
    window=4096,
    copy_bytes=4 * 2**30,
    matrix=8192,
    warm_s=0.5,
    sustained_s=2.0,
    repeats=20,
)
# Small enough for a CPU in seconds. A run shows that the code works, not how fast it is.
TINY = ModelSizes(
    shape=Shape(64, 2, 4, 2, 128, _EMBEDDED_VOCAB, head_dim=16),
    native_len=64,
    factor=4.0,
    dtype=torch.float32,
    cache_tokens=1024,
    chunk_len=64,
    batches=(1, 3),
    contender_batches=(1, 3),
    contender_s=200.0,
    prompt_len=12,
    output_len=6,
    rounds=1,
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
    short_prompts=((12, 0), (8, 32)),
    bursts=((12, 3),),
    arrivals=(4, 0.02),
    sampled=2,
    drafted=(1, 2),
    window=16,
    copy_bytes=2**16,
    matrix=64,
    warm_s=0.0,
    sustained_s=0.0,
    repeats=1,
)


def random_model(
    shape: Shape, native_len: int, dtype: torch.dtype, device: torch.device
) -> LlamaForCausalLM:
    """Build a model of random weights on the device and in its dtype, without a copy."""
    with torch.device("meta"):
        hollow = LlamaForCausalLM(llama_config(shape, native_len, dtype=dtype))
    model = hollow.to(dtype).to_empty(device=device)
    # Made on the CPU, because a GPU's powers differ in the last bit and patching compares bits.
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config).to(device)
    with torch.no_grad():
        fill(model, shape, torch.Generator(device=device).manual_seed(_SEED))
        # The tokenizer has no text for higher ids, so their logits are 0 and never the highest.
        model.lm_head.weight[_EMBEDDED_VOCAB:] = 0
    return model.eval()


def random_windows(sizes: ModelSizes, device: torch.device) -> MistralForCausalLM:
    """Build a Mistral of the same shape, whose layers all have a sliding window."""
    shape = sizes.shape
    values = llama_config(shape, sizes.native_len, dtype=sizes.dtype).to_dict()
    for name in ("model_type", "architectures", "transformers_version", "mlp_bias"):
        values.pop(name, None)
    config = MistralConfig(**{**values, "sliding_window": sizes.window})
    with torch.device("meta"):
        model = MistralForCausalLM(config)
    model = model.to(sizes.dtype).to_empty(device=device)
    model.model.rotary_emb = MistralRotaryEmbedding(config).to(device)
    with torch.no_grad():
        fill(model, shape, torch.Generator(device=device).manual_seed(_SEED))
        model.lm_head.weight[_EMBEDDED_VOCAB:] = 0
    answer: MistralForCausalLM = model.eval()
    return answer


def taken_over(model: LlamaForCausalLM) -> Checkpoint:
    """Patch and check a model, with the embedded model's tokenizer. Raises ModelError."""
    return prepare_model(model, load_tokenizer(EMBEDDED_MODEL), frozenset(), {})


def deployment_of(checkpoint: Checkpoint, sizes: ModelSizes) -> Deployment:
    """Make a deployment with YaRN tiers up to the longest and the policy `grow`."""
    options = DeploymentOptions(
        rope_scaling={"rope_type": "yarn", "factor": sizes.factor},
        rope_policy="grow",
    )
    return make_deployment("random", checkpoint.native, options)


class Prompts:
    """Prompts of random token ids. No two begin alike, so a prefix cache finds none of them."""

    def __init__(self, vocab: int) -> None:
        self._random = random.Random(_SEED)  # noqa: S311  # no secret
        self._ids = range(vocab)

    def below(self, limit: int) -> int:
        """Draw a number from 0 to before `limit`, which may be 0."""
        return self._random.randrange(max(1, limit))

    def of(self, num_tokens: int, count: int = 1) -> Sequence[list[int]]:
        return [self._random.choices(self._ids, k=num_tokens) for _ in range(count)]
