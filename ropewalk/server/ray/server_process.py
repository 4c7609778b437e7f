"""A plain server as the child of an actor: its settings come in, and news of its start go out.

The server ends with the actor. Standard input stays open as long as the actor lives.
"""

import json
import os
import sys
import threading
from typing import Any, TextIO

from ropewalk.model_runtime.child_process import end_with_parent
from ropewalk.server.process.preflight import bound_memory, wait_briefly


def main() -> None:
    """Serve with the settings of the first line of standard input, and end with the parent."""
    bound_memory()
    wait_briefly()
    stated: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    end_with_parent()  # by the kernel, so it ends also if it is stopped
    threading.Thread(target=_wait_for_parent, name="parent", daemon=True).start()
    # Nothing else is imported before the memory is bounded.
    from ropewalk.server.log_lines import log_to_stderr  # noqa: PLC0415
    from ropewalk.server.sentences import DIED, Teller, sentences  # noqa: PLC0415
    from ropewalk.server.settings.load import load_settings  # noqa: PLC0415
    from ropewalk.server.startup.gate import checked  # noqa: PLC0415
    from ropewalk.server.startup.start import serve_model  # noqa: PLC0415

    class News(Teller):
        """Tells the parent where the server listens, and why it does not."""

        def ready(self, version: str, banner: str, url: str) -> None:  # noqa: ARG002
            _tell(news, {"url": url, "banner": banner})

        def fail(self, line: str) -> None:
            _tell(news, {"failed": line})

    news = _own_output()
    with sentences(News()) as teller:
        settings = load_settings(stated)
        log_to_stderr(settings.log_format, settings.log_level)
        has_died = serve_model(settings, checked(settings), stated, teller)
    sys.stderr.flush()
    # Ray looks at nothing but the end, and torch's destructors may take a while.
    os._exit(DIED if has_died else 0)


def _own_output() -> TextIO:
    """Return standard output; what libraries print there goes to standard error from now on."""
    found = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return found


def _tell(news: TextIO, told: dict[str, str]) -> None:
    news.write(json.dumps(told) + "\n")
    news.flush()


def _wait_for_parent() -> None:
    from ropewalk.server.sentences import DIED  # noqa: PLC0415

    while os.read(0, 4096):
        pass
    os._exit(DIED)


if __name__ == "__main__":
    main()
