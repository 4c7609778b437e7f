"""How byte-level vocabularies split text, by `tokenizer.ggml.pre`.

Sources: llama.cpp's table (`llama-vocab.cpp`), and the tokenizer.json of each model where llama.cpp
only rewrites an expression that its library cannot run. Each expression splits the pieces of the
one before it. tests/model_runtime/formats/test_gguf_tokenizer.py checks the pieces.
"""

from dataclasses import dataclass

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = _CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _SIGNS + _REST
_QWEN2 = _CONTRACTIONS + _WORDS + r"\p{N}" + _SIGNS + _REST
_QWEN35 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _REST
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+",
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*",
)
_SLASHED = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*"
_TEKKEN = rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}" + _SLASHED + _REST
_GPT4O = (
    rf"{_CASED[0]}{_CONTRACTIONS}?|{_CASED[1]}{_CONTRACTIONS}?|\p{{N}}{{1,3}}" + _SLASHED + _REST
)
_DEEPSEEK3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _REST
)
_HAN_AND_KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_SEED = _CONTRACTIONS + _WORDS + r"\p{N}| ?[^\s\p{L}\p{N}\r\n]+" + _REST


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """The splits of a byte-level vocabulary, and whether a whole piece may be one token."""

    splits: tuple[str, ...]
    ignores_merges: bool = False  # a piece in the vocabulary is one token, whatever its merges
    adds_bos: bool = False  # where the file does not say


_DIGITS_THEN_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_OF_LLAMA3 = PreTokenizer((_LLAMA3,), ignores_merges=True, adds_bos=True)
_LIKE_LLAMA3 = PreTokenizer((_LLAMA3,))
_OF_QWEN2 = PreTokenizer((_QWEN2,))
_OF_GPT4O = PreTokenizer((_GPT4O,))
_OF_DEEPSEEK3 = PreTokenizer((r"\p{N}{1,3}", _HAN_AND_KANA, _DEEPSEEK3))

PRE_TOKENIZERS = {
    **dict.fromkeys(("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "lfm2"), _OF_LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), _LIKE_LLAMA3),
    **dict.fromkeys(("glm4",), PreTokenizer((_LLAMA3,), ignores_merges=True)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"), _OF_QWEN2
    ),
    "qwen35": PreTokenizer((_QWEN35,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
        _DIGITS_THEN_GPT2,
    ),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "exaone4", "granite-docling"),
        _PLAIN_GPT2,
    ),
    "tekken": PreTokenizer((_TEKKEN,), ignores_merges=True, adds_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _OF_GPT4O),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _OF_DEEPSEEK3),
    "seed-coder": PreTokenizer((_SEED,)),
}
