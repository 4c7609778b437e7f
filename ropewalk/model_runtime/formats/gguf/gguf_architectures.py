"""The architectures that are read: each file's metadata as a config of transformers.

Sources: llama.cpp's converters (the folder `conversion`), which wrote the files, and its model
graphs for what they leave out. tests/gguf_page.py writes the table of docs/reference/gguf.md
from here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf import gguf_hybrids as hybrids
from ropewalk.model_runtime.formats.gguf.ggml import keeps_states
from ropewalk.model_runtime.formats.gguf.gguf_config import Fields, rope_block
from ropewalk.model_runtime.formats.gguf.gguf_file import GgufFile
from ropewalk.model_runtime.formats.gguf.gguf_sizes import config_sizes

Config = dict[str, Any]
_OLMO_EPSILON = "olmo_epsilon"  # a constant in transformers, so it is compared and dropped
_LAYER_NORMS = frozenset({"norm_epsilon", "layer_norm_eps", _OLMO_EPSILON})


@dataclass(frozen=True, slots=True)
class Architecture:
    """How the files of one architecture become a model of transformers."""

    model_type: str
    class_name: str
    config: Callable[[Fields, Config], Config]  # what the common fields do not say
    are_pairs_adjacent: bool = False  # rows of q and k are stored with the two of a pair together
    norm_offset: float = 0.0  # converters add it to the weights of norms
    are_value_heads_tiled: bool = False  # see gguf_hybrids.py
    has_layers_without_keys: bool = False  # with 0 key heads
    epsilon: str = "rms_norm_eps"  # transformers' name of the norms' epsilon


def architecture_of(file: GgufFile) -> Architecture:
    """Return the file's architecture. Raises ModelError with the name of one that is not read."""
    name = file.architecture
    found = ARCHITECTURES.get(name)
    if found is None:
        reason = ", because its layers keep states of another kind" if keeps_states(name) else ""
        raise ModelError(
            f"{file.path}: general.architecture {name} is not read from GGUF{reason}; read are "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    key, other = ALTERNATIVES.get(name, ("", found))
    return other if f"{name}.{key}" in file.metadata else found


def config_of(file: GgufFile) -> Config:
    """Return the file's config as transformers writes it. Raises ModelError."""
    kind = architecture_of(file)
    fields = Fields(file)
    config = _common(fields, kind)
    config |= kind.config(fields, config)
    fields.check_all_read()
    return config | {"model_type": kind.model_type, "architectures": [kind.class_name]}


def _common(fields: Fields, kind: Architecture) -> Config:
    if not fields.boolean("attention.causal", default=True):
        raise fields.refuse("attention.causal", "is false: the model writes no text")
    sizes = config_sizes(
        fields,
        kind.model_type,
        has_layers_without_keys=kind.has_layers_without_keys,
    )
    head_dim, max_len = sizes["head_dim"], sizes["max_position_embeddings"]
    epsilon = "layer_norm_epsilon" if kind.epsilon in _LAYER_NORMS else "layer_norm_rms_epsilon"
    config: Config = {
        **sizes,
        kind.epsilon: fields.number(f"attention.{epsilon}"),
        "tie_word_embeddings": not fields.has_tensor("output.weight"),
        "rope_parameters": rope_block(fields, head_dim, max_len),
        "use_cache": True,
        "dtype": _number_type(fields.file),
    }
    return config | _special_tokens(fields.file, config["vocab_size"])


def _number_type(file: GgufFile) -> str:
    """Return the type to serve on a GPU: the matrices' own, bfloat16 for quantised ones."""
    matrices = {info.type_name for info in file.tensors.values() if len(info.shape) > 1}
    if matrices == {"F32"}:
        return "float32"
    return "float16" if matrices <= {"F16", "F32"} else "bfloat16"


def _special_tokens(file: GgufFile, vocab_size: int) -> Config:
    """Return the ids that a config repeats; None where absent, or transformers sets its own."""
    found: Config = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        index = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
        is_row = type(index) is int and 0 <= index < vocab_size
        found[f"{name}_token_id"] = index if is_row else None
    return found


def _layer_types(fields: Fields, config: Config, period: int) -> Config:
    """Return the layers with a sliding window: by the file's list, or all but every `period`-th."""
    window = fields.integer("attention.sliding_window", 0, minimum=0)
    num_layers = config["num_hidden_layers"]
    stated = fields.value("attention.sliding_window_pattern")
    if window == 0:
        return {"sliding_window": None, "layer_types": ["full_attention"] * num_layers}
    if type(stated) is int and stated > 0:
        period, stated = stated, None
    if stated is None:
        stated = [(index + 1) % period != 0 for index in range(num_layers)]
    if not isinstance(stated, list) or len(stated) != num_layers:
        raise fields.refuse(
            "attention.sliding_window_pattern", f"must say it for each of {num_layers} layers"
        )
    names = ["sliding_attention" if each else "full_attention" for each in stated]
    return {"sliding_window": window, "layer_types": names}


def _two_tables(fields: Fields, config: Config, theta: float) -> Config:
    """Return the rope blocks of full and of sliding layers; scaling is of the full ones."""
    local = {"rope_type": "default", "rope_theta": fields.number("rope.freq_base_swa", theta)}
    return {"full_attention": config["rope_parameters"], "sliding_attention": local}


def _biases(fields: Fields, _: Config) -> Config:
    """Return whether Llama's linears have biases; transformers has them in all or in none."""
    return {
        "attention_bias": fields.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": fields.has_tensor("blk.0.ffn_up.bias"),
    }


def _mixtral(fields: Fields, _: Config) -> Config:
    return {
        "num_local_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "sliding_window": None,
    }


def _arcee(fields: Fields, config: Config) -> Config:
    return _biases(fields, config) | {"hidden_act": "relu2"}


def _qwen2(_: Fields, __: Config) -> Config:
    return {"use_sliding_window": False}


def _qwen3(fields: Fields, _: Config) -> Config:
    return {
        "attention_bias": fields.has_tensor("blk.0.attn_q.bias"),
        "use_sliding_window": False,
    }


def _qwen3_moe(fields: Fields, config: Config) -> Config:
    return _qwen3(fields, config) | {
        "num_experts": fields.integer("expert_count"),
        "num_experts_per_tok": fields.integer("expert_used_count"),
        "moe_intermediate_size": fields.integer("expert_feed_forward_length"),
        "norm_topk_prob": True,  # llama.cpp's graph, which reads no key for it
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def _gemma(_: Fields, __: Config) -> Config:
    return {"hidden_act": "gelu_pytorch_tanh", "attention_bias": False}


def _softmax_scale(config: Config, num_layers_of_27b: int) -> Config:
    """Return Gemma's scale of scores: the 27B models divide by another root (llama.cpp's graph)."""
    is_27b = config["num_hidden_layers"] == num_layers_of_27b
    per_head = config["hidden_size"] // config["num_attention_heads"]
    return {"query_pre_attn_scalar": per_head if is_27b else config["head_dim"]}


def _gemma2(fields: Fields, config: Config) -> Config:
    types = _layer_types(fields, config, period=2)
    return (
        _softmax_scale(config, 46)
        | types
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "attn_logit_softcapping": fields.number("attn_logit_softcapping", 50.0),
            "final_logit_softcapping": fields.number("final_logit_softcapping", 30.0),
        }
    )


def _gemma3(fields: Fields, config: Config) -> Config:
    types = _layer_types(fields, config, period=6)
    softcap = fields.number("final_logit_softcapping", 0.0)
    return (
        _softmax_scale(config, 62)
        | types
        | {
            "hidden_activation": "gelu_pytorch_tanh",
            "attention_bias": False,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": softcap or None,
            "rope_parameters": _two_tables(fields, config, 10_000.0),
        }
    )


def _phi3(fields: Fields, config: Config) -> Config:
    max_len = config["max_position_embeddings"]
    window = fields.integer("attention.sliding_window", 0, minimum=0)
    return {
        "original_max_position_embeddings": fields.integer(
            "rope.scaling.original_context_length", max_len
        ),
        "sliding_window": window or None,
    }


def _starcoder2(fields: Fields, _: Config) -> Config:
    return {"use_bias": fields.has_tensor("blk.0.attn_q.bias"), "sliding_window": None}


def _olmo(fields: Fields, config: Config) -> Config:
    if config.pop(_OLMO_EPSILON) != 1e-5:
        raise fields.refuse("attention.layer_norm_epsilon", "must be 1e-05, as in transformers")
    clip = fields.number("attention.clamp_kqv", 0.0)
    return {"clip_qkv": clip or None, "attention_bias": False}


def _olmo3(fields: Fields, config: Config) -> Config:
    theta = config["rope_parameters"]["rope_theta"]
    types = _layer_types(fields, config, period=4)
    return types | {"rope_parameters": _two_tables(fields, config, theta)}


def _granite(fields: Fields, config: Config) -> Config:
    if not fields.boolean("rope.scaling.finetuned", default=True):
        raise fields.refuse("rope.scaling.finetuned", "is false: the model rotates nothing")
    scale = fields.number("attention.scale", config["head_dim"] ** -0.5)
    return _biases(fields, config) | {
        "attention_multiplier": scale,
        "logits_scaling": fields.number("logit_scale"),
        "residual_multiplier": fields.number("residual_scale", 1.0),
        "embedding_multiplier": fields.number("embedding_scale", 1.0),
    }


def _smollm3(fields: Fields, config: Config) -> Config:
    num_layers = config["num_hidden_layers"]
    rotates = [int((index + 1) % 4 != 0) for index in range(num_layers)]  # llama.cpp's graph
    return _biases(fields, config) | {"no_rope_layers": rotates, "use_sliding_window": False}


def _seed_oss(fields: Fields, _: Config) -> Config:
    return {
        "attention_bias": fields.has_tensor("blk.0.attn_q.bias"),
        "attention_out_bias": fields.has_tensor("blk.0.attn_output.bias"),
        "mlp_bias": fields.has_tensor("blk.0.ffn_up.bias"),
    }


def _ernie(fields: Fields, _: Config) -> Config:
    return {"use_bias": fields.has_tensor("blk.0.attn_q.bias")}


def _cohere(fields: Fields, _: Config) -> Config:
    return {
        "logit_scale": fields.number("logit_scale"),
        "use_qk_norm": fields.has_tensor("blk.0.attn_q_norm.weight"),
        "attention_bias": False,
    }


def _cohere2(fields: Fields, config: Config) -> Config:
    types = _layer_types(fields, config, period=4)
    return types | {"logit_scale": fields.number("logit_scale"), "attention_bias": False}


def _glm4(fields: Fields, _: Config) -> Config:
    if fields.integer("nextn_predict_layers", 0, minimum=0):
        raise fields.refuse("nextn_predict_layers", "is not 0, and such layers are not read")
    return {"attention_bias": fields.has_tensor("blk.0.attn_q.bias")}


def _exaone4(fields: Fields, config: Config) -> Config:
    return _layer_types(fields, config, period=4)


# architecture -> a key that only another model's files have, and that model
ALTERNATIVES: Mapping[str, tuple[str, Architecture]] = {
    "llama": (
        "expert_count",
        Architecture("mixtral", "MixtralForCausalLM", _mixtral, are_pairs_adjacent=True),
    ),
    "olmo2": ("attention.sliding_window", Architecture("olmo3", "Olmo3ForCausalLM", _olmo3)),
}
ARCHITECTURES: Mapping[str, Architecture] = {
    "arcee": Architecture("arcee", "ArceeForCausalLM", _arcee, are_pairs_adjacent=True),
    "cohere2": Architecture("cohere2", "Cohere2ForCausalLM", _cohere2, epsilon="layer_norm_eps"),
    "command-r": Architecture("cohere", "CohereForCausalLM", _cohere, epsilon="layer_norm_eps"),
    "ernie4_5": Architecture("ernie4_5", "Ernie4_5ForCausalLM", _ernie),
    "exaone4": Architecture("exaone4", "Exaone4ForCausalLM", _exaone4),
    "gemma": Architecture("gemma", "GemmaForCausalLM", _gemma, norm_offset=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3, norm_offset=1.0),
    "glm4": Architecture("glm4", "Glm4ForCausalLM", _glm4),
    "granite": Architecture("granite", "GraniteForCausalLM", _granite, are_pairs_adjacent=True),
    "lfm2": Architecture(
        "lfm2",
        "Lfm2ForCausalLM",
        hybrids.lfm2,
        has_layers_without_keys=True,
        epsilon="norm_eps",
    ),
    "lfm2moe": Architecture(
        "lfm2_moe",
        "Lfm2MoeForCausalLM",
        hybrids.lfm2_moe,
        has_layers_without_keys=True,
        epsilon="norm_eps",
    ),
    "llama": Architecture("llama", "LlamaForCausalLM", _biases, are_pairs_adjacent=True),
    "olmo": Architecture(
        "olmo", "OlmoForCausalLM", _olmo, are_pairs_adjacent=True, epsilon=_OLMO_EPSILON
    ),
    "olmo2": Architecture("olmo2", "Olmo2ForCausalLM", lambda *_: {"attention_bias": False}),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _qwen2),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _qwen3),
    "qwen35": Architecture(
        "qwen3_5_text",
        "Qwen3_5ForCausalLM",
        hybrids.qwen35,
        norm_offset=1.0,
        are_value_heads_tiled=True,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        "Qwen3_5MoeForCausalLM",
        hybrids.qwen35_moe,
        norm_offset=1.0,
        are_value_heads_tiled=True,
    ),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen3_moe),
    "qwen3next": Architecture(
        "qwen3_next",
        "Qwen3NextForCausalLM",
        hybrids.qwen3_next,
        norm_offset=1.0,
    ),
    "seed_oss": Architecture("seed_oss", "SeedOssForCausalLM", _seed_oss),
    "smollm3": Architecture("smollm3", "SmolLM3ForCausalLM", _smollm3, are_pairs_adjacent=True),
    "starcoder2": Architecture(
        "starcoder2", "Starcoder2ForCausalLM", _starcoder2, epsilon="norm_epsilon"
    ),
}
