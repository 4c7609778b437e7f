"""The fenced commands of README and docs/, and the way a test runs them unchanged."""

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from ropewalk.model_runtime.loading.model_config import EMBEDDED_MODEL

ROOT = Path(__file__).resolve().parent.parent
_SERVE = re.compile(r"^(?:\w+=\S+ )*ropewalk serve\b|^make serve\b", re.MULTILINE)
_RUN_S = 120


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
        """The text, for this machine: another port, and the embedded model for anybody's own."""
        text = self.text.replace("http://127.0.0.1:8000", url)
        text = text.replace("/models/my-llama", str(EMBEDDED_MODEL))
        text = text.replace(".venv/bin/ropewalk", "ropewalk")
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
    """Run a block to its end, with `ropewalk` on the path."""
    return subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", script],
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        check=False,
        cwd=folder,
        env=_environment(),
    )


def serve(script: str, folder: Path) -> str:
    """Run a block that serves until it listens, then end it; returns its output."""
    log = folder / "log"
    with log.open("w") as stderr:
        # exec, so that the process to end is the server and not a shell before it.
        command = re.sub(r"^((?:\w+=\S+ )*)ropewalk", r"\1exec ropewalk", script)
        process = subprocess.Popen(
            ["/bin/bash", "-c", command], stderr=stderr, cwd=folder, env=_environment()
        )
        try:
            for _ in range(_RUN_S * 10):
                if "listening on" in log.read_text() or process.poll() is not None:
                    break
                try:
                    process.wait(0.1)
                except subprocess.TimeoutExpired:
                    continue
        finally:
            process.terminate()
            process.wait(60)
    return log.read_text()


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
