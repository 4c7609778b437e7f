"""The Dockerfile's instructions, for tests that compare them with other files."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_TEXT = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
STAGES = re.split(r"^FROM ", _TEXT.replace("\\\n", " "), flags=re.MULTILINE)[1:]


def instructions(name: str, stages: list[str] = STAGES) -> list[str]:
    """Return the text behind each instruction of that name, in order."""
    return re.findall(rf"^{name} (.*)$", "\n".join(stages), re.MULTILINE)
