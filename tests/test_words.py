"""The project's prose keeps to plain sentences and to the words of the glossary."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("*.md", "docs/*.md", "benchmarks/*.md")
FOLDERS = ("rope", "model_runtime", "server", "training", "benchmarks", "tests")
# A sentence begins with its subject: "The scheduler ...", not "What the scheduler ...".
OPENERS = re.compile(r"(?:^#* ?|[.:;] |\| )((?:What|Who|Where|Whoever|Of) \w[^?|]*)(?:[.|]|$)")
# Threads, pages and clients are not people.
PEOPLE = re.compile(r"\b(nobody|somebody|lets? go of|(?:is|are) told)\b", re.IGNORECASE)
# Words that the field has another word for (docs/architecture.md, "Words").
REPLACED = re.compile(
    r"\b(kernel_meeting|joined linears?|taken[ -]over models?|mailbox(es)?|distrusts?|kept pages?"
    r"|table slots?|trimmed layers?|asked rows?)\b",
    re.IGNORECASE,
)


def pages() -> Iterator[tuple[str, str]]:
    """Each page a user reads, without its fenced blocks."""
    for path in [path for each in PAGES for path in ROOT.glob(each)]:
        text = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
        yield path.name, text


def docstrings() -> Iterator[tuple[str, str]]:
    """Each docstring of the packages, the scripts and the tests, its lines joined."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, kinds) and (text := ast.get_docstring(node)):
                    joined = re.sub(r"(?<!\n)\n(?!\n)", " ", text)
                    yield f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}", joined


def comments() -> Iterator[tuple[str, str]]:
    """Each comment of the packages, the scripts and the tests; a block's lines are joined."""
    for path in [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]:
        block, row, column = "", 0, 0
        with path.open("rb") as file:
            for token in tokenize.tokenize(file.readline):
                if token.type != tokenize.COMMENT:
                    continue
                is_next = token.start == (row + 1, column)
                if not is_next:
                    yield f"{path.relative_to(ROOT)}:{row}", block
                (row, column), text = token.start, token.string.lstrip("# ")
                block = f"{block} {text}" if is_next else text
        yield f"{path.relative_to(ROOT)}:{row}", block


def found(pattern: re.Pattern[str]) -> list[str]:
    """Each place where a pattern stands, line by line."""
    return [
        f"{where}: {match[0][:80]}"
        for where, text in (*pages(), *docstrings(), *comments())
        for line in text.splitlines()
        for match in pattern.finditer(line)
    ]


def test_sentences_begin_with_their_subject() -> None:
    """A clause with What, Where, Whoever or Of in the place of a noun hides the subject."""
    assert not found(OPENERS)


def test_names_of_tests_begin_with_their_subject() -> None:
    """The rule for sentences holds for names as well."""
    names = re.compile(r"def (test_(?:what|who|where|whoever|of)_\w+)")
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("test_*.py")]
    assert not [name for path in paths for name in names.findall(path.read_text())]


def test_threads_and_pages_are_not_people() -> None:
    """Threads and pages receive no orders; a component returns, raises or releases."""
    assert not found(PEOPLE)


def test_replaced_words_do_not_come_back() -> None:
    """Each thing has one word, which is the field's word where there is one."""
    assert not found(REPLACED)
