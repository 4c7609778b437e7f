"""lm-evaluation-harness over a server, and over transformers, one after the other.

`python -m tests.server.harness FOLDER URL` writes FOLDER/found.json. It holds both models' results
for three tasks: continuations (log-likelihoods within the trained length), and needles beyond it,
as completions and as log-likelihoods. A process of its own, since the harness warns and sets what
it likes; one for both, since its imports take long.
"""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

CHOICES = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{label}}"
target_delimiter: ""
metric_list: [{metric: acc}]
"""
COMPLETIONS = """
task: NAME
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{text}}"
doc_to_target: "{{choices[label]}}"
generation_kwargs: {do_sample: false, max_gen_toks: 16, until: []}
process_results: !function found.is_answered
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
# The module beside the tasks that `!function` names. 16 greedy tokens go on after the answer.
FOUND = """
def is_answered(doc, results):
    return {"acc": float(results[0].startswith(doc["choices"][doc["label"]]))}
"""
# No context ends in a space, and none merges with what follows: the harness splits them by tokens.
CONTINUATIONS = [
    {"text": "import os\nimport", "choices": [" sys", " the", " def"], "label": 0},
    {"text": "def close(self):\n    self.", "choices": ["fp", " 42 is", "close()"], "label": 0},
    {"text": "for i in range", "choices": ["(10):", ": pass", " of it"], "label": 0},
    {"text": "class Error(", "choices": ["Exception):", "1 + 1", "return"], "label": 0},
    {"text": "if x is not", "choices": [" None:", " the", " import"], "label": 0},
    {"text": "try:\n    import", "choices": [" os", " self", ")"], "label": 0},
    {"text": "def __init__(", "choices": ["self", "import", "42"], "label": 0},
    {"text": "    return", "choices": [" self", " and", " os"], "label": 0},
    {"text": "from collections import", "choices": [" namedtuple", " in", " is"], "label": 0},
    {"text": "while True:\n    if", "choices": [" not", " the", "]"], "label": 0},
]
NEEDLES = 4  # in a text, and so the choices of a question
TEXT_CHARS = 4_200  # with needles 1,100 to 1,700 tokens: beyond 1,024, where the factor is 8
FACTOR = 8.0


def needles_in_text(num_texts: int) -> list[dict[str, Any]]:
    """Held-out source text with needles, and a question for each of them."""
    from ropewalk.server.corpus.held_out import library_documents
    from ropewalk.server.corpus.needles import FORMS, random_needles

    rng = random.Random(0)
    documents = [each for each in library_documents(held_out=True) if len(each.text) > 20_000]
    questions = []
    for document in documents[:num_texts]:
        lines = document.text[:TEXT_CHARS].splitlines(keepends=True)[:-1]
        needles = random_needles(rng, NEEDLES, FORMS[0])
        values = [f" {each.value}" for each in needles]
        for number, needle in enumerate(needles):
            lines.insert(len(lines) * (2 * number + 1) // (2 * NEEDLES), needle.definition)
        text = "".join(lines)
        questions += [
            {"text": text + each.question.rstrip(), "choices": values, "label": at}
            for at, each in enumerate(needles)
        ]
    return questions


def scaled_model(folder: Path) -> Path:
    """The embedded model with the static table that the server reads such lengths by."""
    from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL

    folder.mkdir()
    for path in Path(EMBEDDED_MODEL).iterdir():
        (folder / path.name).symlink_to(path)
    config = json.loads((folder / "config.json").read_text())
    length = config["max_position_embeddings"]
    config["max_position_embeddings"] = int(FACTOR * length)
    config["rope_parameters"] |= {
        "rope_type": "yarn",
        "factor": FACTOR,
        "original_max_position_embeddings": length,
    }
    (folder / "config.json").unlink()
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def evaluate(
    folder: Path, model: str, arguments: dict[str, Any], tasks: list[str]
) -> dict[str, dict[str, Any]]:
    """By task: the accuracy, and every text or log-likelihood that the harness got."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found: Any = simple_evaluate(
        model=model,
        model_args={**arguments, "add_bos_token": False, "max_length": 2048},
        tasks=tasks,
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        device="cpu",
        log_samples=True,
        bootstrap_iters=0,
    )
    return {
        task: {
            "accuracy": found["results"][task]["acc,none"],
            "answers": [
                [_answer(each[0]) for each in sample["resps"]]
                for sample in sorted(found["samples"][task], key=lambda each: each["doc_id"])
            ],
        }
        for task in tasks
    }


def _answer(response: Any) -> str | float:
    return response if isinstance(response, str) else float(response[0])


def main(folder: Path, url: str) -> None:
    """Run both models in this order, with the harness's names and arguments for them."""
    from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL

    needles = needles_in_text(num_texts=1)
    for name, template, questions in (
        ("continuations", CHOICES, CONTINUATIONS),
        ("needles", COMPLETIONS, needles),
        ("needle_choices", CHOICES, needles),
    ):
        data = folder / f"{name}.jsonl"
        data.write_text("\n".join(json.dumps(each) for each in questions))
        task = template.replace("NAME", name).replace("DATA", str(data))
        (folder / f"{name}.yaml").write_text(task)
    (folder / "found.py").write_text(FOUND)
    served = {"model": "ropewalk-demo", "base_url": f"{url}/v1/completions"}
    native = {"pretrained": str(EMBEDDED_MODEL), "dtype": "float32"}
    scaled = native | {"pretrained": str(scaled_model(folder / "scaled"))}
    beyond = ["needles", "needle_choices"]
    found = {
        "local-completions": evaluate(
            folder, "local-completions", served, ["continuations", *beyond]
        ),
        "hf": evaluate(folder, "hf", native, ["continuations"])
        | evaluate(folder, "hf", scaled, beyond),
    }
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(Path(sys.argv[1]) / "hf"),
    }
    main(Path(sys.argv[1]), sys.argv[2])
