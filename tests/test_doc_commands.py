"""Every fenced command of README and docs/ that can run here is run, at the smallest sizes."""

import json
from pathlib import Path

import httpx
import pytest

from tests.doc_commands import Block, blocks, run, serve
from tests.servers.processes import Server

# Each once, though it may be on several pages.
BLOCKS = list({block.text: block for block in blocks("bash") if not block.is_make}.values())


@pytest.fixture(scope="module", autouse=True)
def _answered(server: Server) -> None:
    """Complete a prompt, so that a command that reads the metrics finds some in any order."""
    body = {"prompt": "def main():", "max_tokens": 1}
    httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}-{block.number}")
def test_a_command_runs_as_pasted(block: Block, server: Server, tmp_path: Path) -> None:
    """A pasted command exits without an error; one that serves starts to listen."""
    if block.serves:
        assert "listening on" in serve(block.script(server.url), tmp_path)
        return
    ended = run(block.script(server.url), tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout, "it said nothing"


def test_commands_of_the_readme_print_the_promised_output(server: Server, tmp_path: Path) -> None:
    """The needle is found by default, and not on the untouched table."""
    curls = [
        block for block in blocks("bash") if block.page == "README.md" and "curl" in block.text
    ]
    scripts = [block.script(server.url) for block in curls]
    needle, metrics = (run(each, tmp_path).stdout for each in scripts)
    expected = httpx.get(f"{server.url}/playground/needle").json()["expected"]
    found = json.loads(needle)
    assert found["choices"][0]["text"].startswith(expected)
    assert found["choices"][0]["rope"]["rope_type"] == "yarn"
    assert found["choices"][0]["rope"]["factor"] == 8
    assert found["usage"]["prompt_tokens"] > 7 * 256
    native = scripts[0].replace(
        '"temperature": 0', '"temperature": 0, "rope": {"rope_type": "default"}'
    )
    missed = json.loads(run(native, tmp_path).stdout)["choices"][0]
    assert expected not in missed["text"]
    assert missed["rope"]["rope_type"] == "default"
    counted = 'context_bucket="2048",model_name="ropewalk-demo"'
    assert f"ropewalk_time_to_first_token_seconds_count{{{counted}}}" in metrics


def test_every_fence_says_what_it_is() -> None:
    """A command in a fence without a language would not be run."""
    assert blocks("") == []
    run_here = {block.page for block in BLOCKS}
    assert {"README.md", "settings.md", "bench.md"} <= run_here
    makes = [block.text for block in blocks("bash") if block.is_make]
    assert all("make serve" in text or "make test" in text for text in makes)
