"""lm-evaluation-harness over a server, and over transformers, one after the other.

`python -m tests.server.harness FOLDER URL` writes FOLDER/found.json: for each of the harness's two
models the log-likelihood of every choice of every question, and the accuracy. A process of its own,
since the harness warns and sets what it likes; one for both, since its imports take long.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

TASK = """
task: ropewalk_continuations
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
# No context ends in a space, and none merges with what follows: the harness splits them by tokens.
QUESTIONS = [
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


def evaluate(folder: Path, model: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """The log-likelihoods and the accuracy that the harness finds."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    found: Any = simple_evaluate(
        model=model,
        model_args={**arguments, "add_bos_token": False},
        tasks=["ropewalk_continuations"],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        device="cpu",
        log_samples=True,
        bootstrap_iters=0,
    )
    samples = found["samples"]["ropewalk_continuations"]
    return {
        "accuracy": found["results"]["ropewalk_continuations"]["acc,none"],
        "logprobs": {
            each["doc"]["text"]: [float(choice[0][0]) for choice in each["resps"]]
            for each in samples
        },
    }


def main(folder: Path, url: str) -> None:
    """Run both models in this order, with the harness's names and arguments for them."""
    from model_runtime.loading.model_config import EMBEDDED_MODEL

    data = folder / "test.jsonl"
    data.write_text("\n".join(json.dumps(each) for each in QUESTIONS))
    (folder / "continuations.yaml").write_text(TASK.replace("DATA", str(data)))
    models: dict[str, dict[str, Any]] = {
        "local-completions": {"model": "ropewalk-demo", "base_url": f"{url}/v1/completions"},
        "hf": {"pretrained": str(EMBEDDED_MODEL), "dtype": "float32"},
    }
    found = {name: evaluate(folder, name, arguments) for name, arguments in models.items()}
    (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ |= {
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HOME": str(Path(sys.argv[1]) / "hf"),
    }
    main(Path(sys.argv[1]), sys.argv[2])
