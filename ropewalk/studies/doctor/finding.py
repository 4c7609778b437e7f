"""One finding of a check, and how a check that fails by itself becomes one."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ropewalk.server.sentences import USAGE_ERROR

Status = Literal["ok", "warn", "fail"]
_WIDTH = 13  # of the longest name and two spaces


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check."""

    status: Status
    name: str
    text: str
    action: str = ""  # for the user; empty if there is nothing to do
    exit_code: int = USAGE_ERROR  # of `serve`, if it fails for the same reason

    def line(self) -> str:
        """Return status, name, finding and action; a finding of several lines stands below."""
        action = f"; {self.action}" if self.action else ""
        if "\n" in self.text:
            return f"{self.status:<5} {self.name}\n{self.text}{action}"
        return f"{self.status:<5} {self.name:<{_WIDTH}} {self.text}{action}"


def checked(name: str, check: Callable[[], Finding]) -> Finding:
    """Run a check. Any exception of it becomes a failure with the exception's first line."""
    try:
        return check()
    except Exception as error:  # noqa: BLE001  # a broken package raises any type
        first_line = str(error).strip().partition("\n")[0]
        return Finding(
            "fail",
            name,
            f"cannot be checked: {type(error).__name__}: {first_line}",
            "install ropewalk again into a new virtual environment (docs/guide/install.md)",
        )
