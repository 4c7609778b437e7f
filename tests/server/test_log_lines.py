"""Every command logs in one format."""

import re
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
