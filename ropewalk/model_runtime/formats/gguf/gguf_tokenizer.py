"""Build a tokenizer of the library `tokenizers` from a file's vocabulary.

Source: llama.cpp's `llama-vocab.cpp`, whose tokens the tests compare. transformers' own conversion
splits text like GPT-2 for each `tokenizer.ggml.pre` that it does not list, `smollm` for example.
"""

from dataclasses import dataclass
from itertools import groupby

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

from ropewalk.model_runtime.errors import ModelError
from ropewalk.model_runtime.formats.gguf.gguf_file import GgufFile
from ropewalk.model_runtime.formats.gguf.gguf_pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_KEY = "tokenizer.ggml."
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 2, 3, 4, 5  # token types
_TYPES = frozenset(range(7))  # from undefined to byte
_SPACE = "\u2581"  # sentencepiece's space
# Tokens that end an answer by their text, as in llama.cpp: many files lack eot_token_id. llama.cpp
# takes plain tokens of such a text, too, and then Qwen's answers would end at a `</s>` in HTML.
_ENDS = frozenset(
    {"<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>"}
    | {"<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "<|end_of_text|>", "<end_of_utterance>"}
    | {"<eos>", "<turn|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"}
)
# Converters write -1 for a special token that the vocabulary lacks. llama.cpp ignores it.
_NO_TOKEN = 2**32 - 1
# The defaults of sentencepiece files without these keys, as in llama.cpp.
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}


@dataclass(frozen=True, slots=True)
class FileTokenizer:
    """A tokenizer, its special tokens, and the tokens that end an answer."""

    backend: Tokenizer
    special_tokens: dict[str, str]  # bos_token, eos_token, ... -> text
    end_ids: frozenset[int]
    chat_templates: dict[str, str]  # by their names


def _chat_templates(file: GgufFile) -> dict[str, str]:
    """Return the file's chat templates by their names. Raises ModelError."""
    key = "tokenizer.chat_template"
    keys = {"default": key} | {
        name.removeprefix(f"{key}."): name for name in file.metadata if name.startswith(f"{key}.")
    }
    return {
        name: file.string(each)
        for name, each in keys.items()
        if file.metadata.get(each) is not None
    }


def read_tokenizer(file: GgufFile) -> FileTokenizer:
    """Build the tokenizer. Raises ModelError that names the key which is missing or not read."""
    vocabulary = _Vocabulary(file)
    kind = file.string(f"{_KEY}model")
    if kind == "gpt2":
        pre = _pre_tokenizer(file)
        backend, adds_bos = _byte_level(vocabulary, pre), pre.adds_bos
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(vocabulary), True
    else:
        raise ModelError(
            f"{file.path}: {_KEY}model {kind} is not read; read are gpt2 (byte-level) and llama "
            "(sentencepiece)"
        )
    vocabulary.add_whole_tokens(backend)
    ids = vocabulary.special_ids(kind)
    _add_ends(backend, vocabulary, ids, adds_bos=adds_bos)
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    special = {name: vocabulary.tokens[ids[key]] for name, key in named.items() if key in ids}
    ends = {ids[key] for key in ("eos", "eot", "eom") if key in ids}
    ends |= vocabulary.ends_by_text()
    return FileTokenizer(backend, special, frozenset(ends), _chat_templates(file))


def ids_without_token(file: GgufFile) -> list[str]:
    """Return the keys of special tokens that name none, each with its value."""
    ids = [key for key in file.metadata if key.startswith(_KEY) and key.endswith("_token_id")]
    return [f"{key} {file.metadata[key]}" for key in ids if file.metadata[key] == _NO_TOKEN]


class _Vocabulary:
    """The tokens of a file, with their types."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        tokens = file.listed(f"{_KEY}tokens", str)
        if not tokens:
            raise ModelError(
                f"{file.path} has no tokenizer ({_KEY}tokens): convert the model with its tokenizer"
            )
        self.tokens: list[str] = tokens
        types = file.listed(f"{_KEY}token_type", int, len(tokens))
        unknown = set(types or ()) - _TYPES
        if unknown:
            raise ModelError(
                f"{file.path}: {_KEY}token_type must be from {min(_TYPES)} to {max(_TYPES)}, got "
                f"{min(unknown)}"
            )
        self.types: list[int] = types or [1] * len(tokens)

    def ids(self) -> dict[str, int]:
        """Return text -> id, without the converter's fillers for rows that no token uses."""
        rows = enumerate(zip(self.tokens, self.types, strict=True))
        used = [
            (token, index)
            for index, (token, kind) in rows
            if not (kind == _UNUSED and token == f"[PAD{index}]")
        ]
        found = dict(used)
        if len(found) != len(used):
            twice = next(token for token, index in used if found[token] != index)
            raise ModelError(f"{self.file.path}: {_KEY}tokens has {twice!r} twice")
        return found

    def special_ids(self, kind: str) -> dict[str, int]:
        """Return the ids that the file names: bos, eos, eot, eom, unknown, padding."""
        found = dict(_SENTENCEPIECE_IDS) if kind == "llama" else {}
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
            key = f"{_KEY}{name}_token_id"
            if self.file.metadata.get(key) not in (None, _NO_TOKEN):
                index = self.file.integer(key, minimum=0)
                if index >= len(self.tokens):
                    raise ModelError(
                        f"{self.file.path}: {key} must be < {len(self.tokens)}, got {index}"
                    )
                found[name] = index
        return {name: index for name, index in found.items() if index < len(self.tokens)}

    def ends_by_text(self) -> set[int]:
        """Return the tokens that end an answer by their text, of those that no text holds."""
        rows = enumerate(zip(self.tokens, self.types, strict=True))
        whole = (_CONTROL, _USER_DEFINED)
        return {index for index, (token, kind) in rows if token in _ENDS and kind in whole}

    def add_whole_tokens(self, backend: Tokenizer) -> None:
        """Add the tokens that are found in a text before it is split.

        Each call of the library takes milliseconds with many tokens, so neighbours share one.
        """
        name = self.file.metadata.get("general.name")
        # llama.cpp, too, knows this by the model's name only.
        strips = isinstance(name, str) and any(each in name.lower() for each in ("phi-3", "phi3"))
        kept = {"<unk>", "<s>", "<|endoftext|>"}
        whole = [
            AddedToken(
                token,
                normalized=False,
                special=kind != _USER_DEFINED,
                rstrip=strips and token not in kept,
            )
            for token, kind in zip(self.tokens, self.types, strict=True)
            if kind in (_CONTROL, _UNKNOWN, _USER_DEFINED)
        ]
        for is_special, added in groupby(whole, lambda each: each.special):
            (backend.add_special_tokens if is_special else backend.add_tokens)(list(added))


def _pre_tokenizer(file: GgufFile) -> PreTokenizer:
    key = f"{_KEY}pre"
    name = file.metadata.get(key)
    found = PRE_TOKENIZERS.get(name) if isinstance(name, str) else None
    if found is None:
        stated = "is missing" if name is None else f"{name} is not read"
        raise ModelError(
            f"{file.path}: {key} {stated}, so the text would be split in another way than in "
            f"training; read are {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return found


def _byte_level(vocabulary: _Vocabulary, pre: PreTokenizer) -> Tokenizer:
    file = vocabulary.file
    merges = file.listed(f"{_KEY}merges", str)
    if merges is None:
        raise ModelError(f"{file.path} has no {_KEY}merges")
    ids, pairs = vocabulary.ids(), []
    for index, merge in enumerate(merges):
        first, _, second = merge[1:].partition(" ")  # a token may begin with a space
        first = merge[:1] + first
        # The library panics at some results that are no token.
        if not (first in ids and second in ids and first + second in ids):
            raise ModelError(
                f"{file.path}: {_KEY}merges do not fit the tokens: entry {index} is {merge[:60]!r}"
            )
        pairs.append((first, second))
    backend = Tokenizer(models.BPE(ids, pairs, ignore_merges=pre.ignores_merges))
    splits = [pre_tokenizers.Split(Regex(split), "isolated") for split in pre.splits]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> Tokenizer:
    file = vocabulary.file
    ids = vocabulary.ids()
    scores = file.listed(f"{_KEY}scores", float, len(vocabulary.tokens))
    if scores is None:
        raise ModelError(f"{file.path} has no {_KEY}scores")
    row = vocabulary.special_ids("llama")["unknown"]
    unknown = vocabulary.tokens[row]
    if unknown not in ids:  # the library fails at the first text that needs it
        raise ModelError(f"{file.path}: {_KEY}unknown_token_id is {row}, and that row has no token")
    model = models.BPE(
        ids, merges_by_score(ids, scores), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    backend = Tokenizer(model)
    # Before each piece of text between special tokens, as llama.cpp does.
    has_prefix = file.boolean(f"{_KEY}add_space_prefix", default=True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    backend.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    backend.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return backend


def merges_by_score(ids: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Return every pair of tokens that joins to a token, the best score first.

    Sentencepiece joins the neighbours whose result has the best score. A list of merges in this
    order does the same.
    """
    ranked = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            first, second = token[:cut], token[cut:]
            if first in ids and second in ids:
                ranked.append((-scores[index], index, cut, first, second))
    ranked.sort()
    return [(first, second) for *_, first, second in ranked]


def _add_ends(
    backend: Tokenizer, vocabulary: _Vocabulary, ids: dict[str, int], *, adds_bos: bool
) -> None:
    """Add the tokens before and after every text, where the file wants them."""
    file = vocabulary.file
    before = file.boolean(f"{_KEY}add_bos_token", default=adds_bos)
    after = file.boolean(f"{_KEY}add_eos_token", default=False)
    parts, special = ["$A"], []
    for name, is_wanted, at in (("bos", before, 0), ("eos", after, len(parts) + before)):
        if is_wanted and name not in ids:
            raise ModelError(
                f"{file.path}: {_KEY}add_{name}_token is set without a {name}_token_id"
            )
        if is_wanted:
            token = vocabulary.tokens[ids[name]]
            parts.insert(at, token)
            special.append((token, ids[name]))
    if special:
        backend.post_processor = TemplateProcessing(single=parts, special_tokens=special)
