"""The names of the tasks, and their samples by name."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ropewalk.studies.harness.eval_run import EvalError
from ropewalk.studies.ruler.frequencies import cwe_maker, fwe_maker
from ropewalk.studies.ruler.niah import NIAH_TASKS, answer_position, niah_maker
from ropewalk.studies.ruler.qa import QA_FLAGS, QA_TASKS, QuestionSet, qa_maker
from ropewalk.studies.ruler.sample import Encode, Maker, MisfitError, Sample, fit
from ropewalk.studies.ruler.vt import vt_maker

TASKS = (*NIAH_TASKS, "vt", "cwe", "fwe", *QA_TASKS)
ESSAY_TASKS = tuple(name for name, needles in NIAH_TASKS.items() if needles.reads_essays)


def read_essays(tasks: Sequence[str]) -> bool:
    return not set(tasks).isdisjoint(ESSAY_TASKS)


def make_samples(
    task: str,
    count: int,
    context_len: int,
    *,
    seed: int,
    essay: Sequence[str],
    question_sets: Mapping[str, QuestionSet],
    encode: Encode,
    special_ids: tuple[int, ...],
) -> tuple[Sample, ...]:
    """Return samples that fill a context of so many tokens, answer and special tokens included.

    A sample has the same needles, names, words and question at every length. Each task of QA_TASKS
    needs its set of at least `count` questions.

    Raises EvalError if a context is too short for the task, or longer than the essay or all
    documents.
    """
    samples = []
    least_lens = []
    seeds = [f"{seed}/{task}/{index}" for index in range(count)]
    if task in QA_TASKS:
        makers = _qa_makers(question_sets[task], seeds, f"{seed}/{task}")
    else:
        makers = (_maker(task, context_len, each, essay, encode) for each in seeds)
    for index, maker in enumerate(makers):
        try:
            sample = fit(task, index, maker, context_len, encode=encode, special_ids=special_ids)
        except MisfitError as misfit:
            if misfit.least_len is None:
                raise EvalError(
                    f"{_stock(task, maker, question_sets)} are too few for {task} with "
                    f"{context_len} tokens"
                ) from misfit
            least_lens.append(misfit.least_len)
            continue
        if task in NIAH_TASKS:
            position = answer_position(sample.draft, encode)
            sample = replace(sample, token_position_answer=position)
        samples.append(sample)
    if least_lens:
        raise EvalError(
            f"--context-lens must be >= {max(least_lens)} tokens for {task} with this model's "
            f"tokenizer, got {context_len}"
        )
    return tuple(samples)


def _maker(task: str, context_len: int, seed: str, essay: Sequence[str], encode: Encode) -> Maker:
    if task == "vt":
        return vt_maker(context_len, seed, encode)
    if task == "cwe":
        return cwe_maker(context_len, seed)
    if task == "fwe":
        return fwe_maker(context_len, seed)
    return niah_maker(NIAH_TASKS[task], essay, seed)


def _qa_makers(questions: QuestionSet, seeds: Sequence[str], order_seed: str) -> Iterator[Maker]:
    chosen = questions.choose(len(seeds), order_seed)
    for question, seed in zip(chosen, seeds, strict=True):
        yield qa_maker(question, questions.documents, seed)


def _stock(task: str, maker: Maker, question_sets: Mapping[str, QuestionSet]) -> str:
    """Return all that a haystack can be made of, with the option that names more of it."""
    if task in QA_TASKS:
        return f"{QA_FLAGS[task]}: {maker.most} documents in {question_sets[task].path}"
    if task == "cwe":
        return f"{maker.most} words of the list"
    return f"--text: {maker.most} words"
