"""A YaRN block that was added to a checkpoint scales by length, as the server's own does."""

import json
import shutil
from pathlib import Path

from ropewalk.model_runtime.deployments.make_deployment import DeploymentOptions, make_deployment
from ropewalk.model_runtime.loading.checkpoint import Checkpoint, load_checkpoint
from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.doubles.engines import EngineFactory, answer, request

ADDED = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
TRAINED = {**ADDED, "original_max_position_embeddings": 64}  # ends at max_position_embeddings


def with_block(folder: Path, block: dict[str, object]) -> Checkpoint:
    """The embedded model with a block in its config.json, loaded as `serve` loads it."""
    shutil.copytree(EMBEDDED_MODEL, folder)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["rope_parameters"] = {**(config.get("rope_parameters") or {}), **block}
    path.write_text(json.dumps(config))
    return load_checkpoint(folder)


def test_an_added_block_answers_as_the_model_without_it(
    engines: EngineFactory, embedded: Checkpoint, tmp_path: Path
) -> None:
    """Answers of prompts within L and beyond have the same bits, and say the same tables."""
    added = with_block(tmp_path / "added", ADDED)
    assert added.native.added_block is not None
    options = DeploymentOptions(rope_scaling={"rope_type": "yarn", "factor": 4.0})
    prompt = embedded.tokenizer.encode("import os\n\ndef walk(path):\n    " * 80)[:900]
    found = []
    for checkpoint, chosen in ((added, DeploymentOptions()), (embedded, options)):
        deployment = make_deployment("m", checkpoint.native, chosen)
        engine = engines.over(checkpoint)
        asked = [
            request(deployment, prompt[:size], max_tokens=20, logprobs=1)
            for size in (100, 250, 900)
        ]
        found.append(answer(engine, *asked))
    assert found[0] == found[1]
    assert [each.num_rescales for each in found[0]] == [0, 1, 0]


def test_a_trained_block_is_static_until_a_policy_says_otherwise(
    engines: EngineFactory, embedded: Checkpoint, tmp_path: Path
) -> None:
    """The override scales by length over the same weights: short prompts have the plain table."""
    trained = with_block(tmp_path / "trained", TRAINED)
    prompt = embedded.tokenizer.encode("import os\n\ndef walk(path):\n    " * 80)[:60]
    plain = make_deployment("m", embedded.native)
    expected = answer(engines.over(embedded), request(plain, prompt, max_tokens=4, logprobs=1))
    found = {}
    for policy in (None, "by_position"):
        options = DeploymentOptions(rope_policy=policy)  # type: ignore[arg-type]
        deployment = make_deployment("m", trained.native, options)
        asked = request(deployment, prompt, max_tokens=4, logprobs=1)
        found[policy] = answer(engines.over(trained), asked)
    assert found["by_position"] == expected != found[None]
