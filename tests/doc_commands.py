"""The fenced commands of README and docs/, and the way a test runs them unchanged."""

import os
import re
import shlex
import subprocess
import sys
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL
from tests.doubles.waiting import wait_until
from tests.servers import preloaded
from tests.servers.processes import end, run_to_end

ROOT = Path(__file__).resolve().parent.parent
_SERVE = re.compile(r"^(?:\w+=\S+ )*ropewalk serve\b|^make serve\b", re.MULTILINE)
_RUN_S = 120
# Variables and one command of ours, with nothing for a shell to do.
_OURS = re.compile(r"((?:\w+=\S+ )*)ropewalk ([^|<>\n]+)")
# Studies of a page at the smallest sizes, because only the command is tested here.
_SIZES = {
    r"--context-lens \S+": "--context-lens 128,256",
    r"--windows \d+": "--windows 1",
    r"--queries [1-9]\d*": "--queries 1",
    r"--requests \d+": "--requests 1",
    r"--sample-tokens \d+": "--sample-tokens 64",
    r"(ropewalk eval (?!.*--context-lens))": r"\1--context-lens 128,256 --windows 1 ",
}


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block."""

    page: str
    number: int  # in the page, from 1
    language: str
    text: str

    @property
    def is_make(self) -> bool:
        """Whether it is `make ...`, which runs the tests themselves and so is not run by them."""
        return self.text.startswith("make ")

    @property
    def serves(self) -> bool:
        """Whether it runs until it is stopped."""
        return _SERVE.search(self.text) is not None and not self.is_make

    def script(self, url: str) -> str:
        """The text with another port, smaller sizes, and the embedded model for anybody's own."""
        text = self.text.replace("http://127.0.0.1:8000", url)
        text = text.replace("/models/my-llama", str(EMBEDDED_MODEL))
        text = text.replace(".venv/bin/ropewalk", "ropewalk")
        for stated, small in _SIZES.items():
            text = re.sub(stated, small, text)
        if self.serves:
            text = re.sub(r"ROPEWALK_PORT=\d+", "ROPEWALK_PORT=0", text)
            if "ROPEWALK_PORT" not in text:
                text = re.sub(r" --port \d+", "", text).rstrip() + " --port 0\n"
        return text


def blocks(*languages: str) -> list[Block]:
    """The blocks of README and every page of docs/, in order."""
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        fenced = re.findall(r"^```(\w*)\n(.*?)^```", path.read_text(), re.DOTALL | re.MULTILINE)
        for number, (language, text) in enumerate(fenced, 1):
            if language in languages:
                found.append(Block(path.name, number, language, text))
    return found


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a block to its end in a folder, with `ropewalk` on the path."""
    before, _, last = script.rstrip("\n").rpartition("\n")
    ours = None if before.endswith(("\\", "|")) else _own_command(last)
    ended = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", script if ours is None else before],
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        check=False,
        cwd=folder,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
    )
    if ours is None or ended.returncode:
        return ended
    with chdir(folder):
        return run_to_end(*ours[1], env=ours[0])


def serve(script: str, folder: Path) -> str:
    """Run a block that serves until it listens, then end it; returns its output."""
    ours = _own_command(script.rstrip("\n"))
    assert ours is not None, script
    environment, arguments = ours
    log = folder / "log"
    with log.open("w") as stderr:
        process = preloaded.parent().fork(
            "ropewalk", arguments, stdout=1, stderr=stderr.fileno(), env=environment
        )
        try:
            wait_until(
                lambda: "listening on" in log.read_text() or process.poll() is not None,
                limit_s=_RUN_S,
            )
        finally:
            end(process)
    return log.read_text()


def _own_command(script: str) -> tuple[dict[str, str], list[str]] | None:
    """The variables and the arguments of a command of ours; it runs as a fork (`preloaded`)."""
    found = _OURS.fullmatch(script)
    if found is None:
        return None
    variables = (each.split("=", 1) for each in shlex.split(found[1]))
    return dict(variables), shlex.split(found[2])
