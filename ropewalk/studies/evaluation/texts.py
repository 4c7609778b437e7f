"""The texts of the evaluation, the perplexity windows in them, and the haystacks."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ropewalk.model_runtime.text.tokenizer import Tokenizer
from ropewalk.server.corpus.haystack import LINES_A_TOKEN, Haystack
from ropewalk.server.corpus.held_out import Document, library_documents
from ropewalk.server.corpus.needles import random_needles
from ropewalk.studies.evaluation.plan import EvalError, LengthPlan

NEEDLES = 4  # max in a context
_TRIES = 20


@dataclass(frozen=True, slots=True)
class LengthSource:
    """A text long enough for the longest context, and its tokens without special tokens."""

    name: str
    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Texts:
    """The sources that contexts are cut from."""

    sources: tuple[LengthSource, ...]
    special_ids: tuple[int, ...]  # the tokenizer adds them before every text
    is_joined: bool  # no document was long enough, so all of them are one text

    @property
    def num_tokens(self) -> int:
        return sum(len(each.token_ids) for each in self.sources)


@dataclass(frozen=True, slots=True)
class LengthWindow:
    """One span of target tokens, and the text before it that fits the longest context."""

    source: str
    end: int  # of the targets in the source, in tokens
    token_ids: tuple[int, ...]  # ends with the targets
    target_bytes: int

    def prompt(self, context_len: int, special_ids: tuple[int, ...]) -> tuple[int, ...]:
        """Return exactly `context_len` tokens, which always end with the targets."""
        num_text = context_len - len(special_ids)
        return (*special_ids, *self.token_ids[-num_text:])


@dataclass(frozen=True, slots=True)
class LengthText:
    """A text that is read once, with windows before each of several lengths."""

    source: str
    ends: tuple[int, ...]  # lengths, ascending
    num_windows: tuple[int, ...]  # before each end
    target_tokens: int  # of each window
    token_bytes: tuple[int, ...]  # bytes of each token

    @property
    def first_target(self) -> int:
        return min(self._first(at) for at in range(len(self.ends)))

    def windows(self, at: int) -> list[tuple[int, int, int]]:
        """Return begin, end and bytes of the windows before the end with an index."""
        size, last = self.target_tokens, self.ends[at]
        spans = [(begin, begin + size) for begin in range(self._first(at), last, size)]
        return [(begin, end, sum(self.token_bytes[begin:end])) for begin, end in spans]

    def _first(self, at: int) -> int:
        return self.ends[at] - self.num_windows[at] * self.target_tokens


def read_documents(paths: Sequence[Path]) -> list[Document]:
    """Read UTF-8 files, and all UTF-8 files in folders; without paths, the held-out library.

    Raises EvalError if a path does not exist or cannot be read.
    """
    if not paths:
        return library_documents(held_out=True)
    documents = []
    for path in paths:
        if path.is_dir():
            inside = sorted(each for each in path.rglob("*") if each.is_file())
            texts = [(each, _text(each)) for each in inside]
            documents += [Document(str(each), text) for each, text in texts if text]
            continue
        text = _text(path)
        if not text:
            raise EvalError(f"--text: {path} is no file of UTF-8 text")
        documents.append(Document(str(path), text))
    if not documents:
        raise EvalError(f"--text: there is no UTF-8 text in {', '.join(map(str, paths))}")
    return documents


def make_texts(documents: Sequence[Document], tokenizer: Tokenizer, longest: int) -> Texts:
    """Keep the documents that fill the longest context alone, or else join all of them.

    Raises EvalError.
    """
    special_ids = tokenizer.leading_special_ids()
    everything = [_source(each, tokenizer) for each in documents]
    sources = [each for each in everything if len(each.token_ids) >= longest]
    if sources:
        return Texts(tuple(sources), special_ids, is_joined=False)
    joined = _source(Document("all texts", "\n".join(each.text for each in documents)), tokenizer)
    if len(joined.token_ids) < longest:
        raise EvalError(
            f"--context-lens must be <= {len(joined.token_ids)} tokens, which is all that the text "
            f"has, got {longest}; --text names more of it"
        )
    return Texts((joined,), special_ids, is_joined=True)


def choose_windows(texts: Texts, plan: LengthPlan, tokenizer: Tokenizer) -> list[LengthWindow]:
    """Sample `num_windows` windows by the seed, without overlapping targets. Raises EvalError."""
    size = plan.target_tokens
    places = [
        (source, end)
        for source in texts.sources
        for end in range(plan.longest, len(source.token_ids) + 1, size)
    ]
    if plan.num_windows > len(places):
        raise EvalError(
            f"--windows must be <= {len(places)}, so many spans of {size} tokens have "
            f"{plan.longest} tokens of text to their end; got {plan.num_windows}"
        )
    rng = random.Random(plan.seed)  # noqa: S311  # a choice of text, no secret
    windows = []
    for source, end in rng.sample(places, plan.num_windows):
        ids = source.token_ids[end - plan.longest : end]
        num_bytes = sum(len(tokenizer.token_bytes(each)) for each in ids[-size:])
        windows.append(LengthWindow(source.name, end, ids, num_bytes))
    return windows


def choose_texts(texts: Texts, plan: LengthPlan) -> list[LengthSource]:
    """Sample `num_windows` texts of the longest length by the seed, disjoint. Raises EvalError."""
    size = plan.longest - len(texts.special_ids)
    places = [
        (source, begin)
        for source in texts.sources
        for begin in range(0, len(source.token_ids) - size + 1, size)
    ]
    if plan.num_windows > len(places):
        raise EvalError(
            f"--windows must be <= {len(places)}, so many texts of {plan.longest} tokens there "
            f"are; got {plan.num_windows}"
        )
    rng = random.Random(plan.seed)  # noqa: S311  # a choice of text, no secret
    return [
        LengthSource(source.name, "", source.token_ids[begin : begin + size])
        for source, begin in rng.sample(places, plan.num_windows)
    ]


def choose_haystacks(texts: Texts, plan: LengthPlan, tokenizer: Tokenizer) -> list[Haystack]:
    """Build enough haystacks for `num_queries` questions per length, by the seed.

    Forms and depths alternate.
    """
    rng = random.Random(plan.seed)  # noqa: S311  # a choice of text, no secret
    num_classes = -(-len(plan.depths) // NEEDLES)
    haystacks: list[Haystack] = []
    num_queries = 0
    while num_queries < plan.num_queries:
        number = len(haystacks)
        depths = plan.depths[number % num_classes :: num_classes]
        form = plan.forms[number // num_classes % len(plan.forms)]
        needles = tuple(random_needles(rng, len(depths), form))
        source, lines = _cut(rng, texts, plan.longest, tokenizer)
        line_lens = tuple(len(tokenizer.encode(each, add_special_tokens=False)) for each in lines)
        haystacks.append(Haystack(source, lines, line_lens, needles, depths))
        num_queries += len(depths)
    return haystacks


def _cut(
    rng: random.Random, texts: Texts, longest: int, tokenizer: Tokenizer
) -> tuple[str, tuple[str, ...]]:
    """Cut lines up to a random line end with enough text before it. Raises EvalError."""
    source = rng.choice(texts.sources)
    lines = [f"{line}\n" for line in source.text.removesuffix("\n").split("\n")]
    if len(lines) <= NEEDLES:
        raise EvalError(
            f"--text: needles are hidden at line ends, and {source.name} has {len(lines)} of them; "
            f"it must have more than {NEEDLES}"
        )
    most = LINES_A_TOKEN * longest
    for _ in range(_TRIES):
        end = rng.randint(1, len(lines))
        before = "".join(lines[:end])
        if len(tokenizer.encode(before, add_special_tokens=False)) >= longest:
            return source.name, tuple(lines[:end][-most:])
    return source.name, tuple(lines[-most:])


def _text(path: Path) -> str:
    """Read a file; return an empty text if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""
    except OSError as error:
        raise EvalError(f"--text: cannot read {path}: {error.strerror}") from error


def _source(document: Document, tokenizer: Tokenizer) -> LengthSource:
    ids = tokenizer.encode(document.text, add_special_tokens=False, param="--text")
    return LengthSource(document.name, document.text, tuple(ids))
