"""Every command logs in one format."""

import re
import subprocess
import sys
from pathlib import Path

from tests.processes import run_to_end


def test_eval_logs_in_the_format_of_serve(tmp_path: Path) -> None:
    """The lines of the load stand on standard error, and none of them on standard output."""
    ended = run_to_end(
        *("eval", "--methods", "none", "--context-lens", "64", "--windows", "1"),
        *("--queries", "0", "--output", str(tmp_path)),
    )
    assert ended.returncode == 0, ended.stderr
    lines = ended.stderr.splitlines()
    starts = [re.match(r"timestamp='\S+' level='info' event='(\w+)' ", line) for line in lines]
    events = [found[1] for found in starts if found]
    assert events == ["loading_weights", "load_progress", "self_check"]
    assert "timestamp=" not in ended.stdout
    assert "\r" not in ended.stderr


_LIBRARY_LINES = """
from server.log_lines import log_to_stderr
log_to_stderr()
import sys
assert not {"uvicorn", "transformers"} & set(sys.modules)
import logging, uvicorn
from transformers.utils import logging as of_transformers
from server.settings.load import ServeSettings
from server.startup.lifecycle import _uvicorn_config
_uvicorn_config(ServeSettings(), object())
of_transformers.get_logger("transformers.some").warning("is %s", 1)
try:
    raise ValueError("broken")
except ValueError:
    logging.getLogger("uvicorn.error").exception("failed")
logging.getLogger("uvicorn.error").info("not told")
"""


def test_lines_of_libraries_have_the_format_of_ours() -> None:
    """The libraries are not imported for it, and add no handler of their own."""
    ended = subprocess.run(
        [sys.executable, "-c", _LIBRARY_LINES], capture_output=True, text=True, check=True
    )
    told = [re.sub("^timestamp=\\S+ ", "", line) for line in ended.stderr.splitlines()]
    assert told[0] == (
        "level='warning' event='library_message' logger='transformers.some' message='is 1'"
    )
    assert "level='error' event='library_message' logger='uvicorn.error' message='f" in told[1]
    assert "ValueError: broken" in told[1]
    assert len(told) == 2
