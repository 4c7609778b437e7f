"""The end of a process that stands still."""

import os
import signal
import subprocess
import sys
import time

_WATCHED = """
import sys, time
from ropewalk.server.replicas.watchdog import Watchdog
watchdog = Watchdog(1.0)
print("ready", flush=True)
if sys.argv[1] == "end":
    watchdog.end()
    watchdog._process.wait()
    print("ended", flush=True)
time.sleep(float(sys.argv[2]))
"""


def watched(*arguments: str) -> subprocess.Popen[str]:
    """A process with a watchdog of one second."""
    process = subprocess.Popen(
        [sys.executable, "-c", _WATCHED, *arguments], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_a_stopped_process_is_killed() -> None:
    """SIGSTOP leaves it no way to end by itself."""
    with watched("stay", "60") as process:
        os.kill(process.pid, signal.SIGSTOP)
        assert process.wait(20) == -signal.SIGKILL


def test_a_living_process_is_left_alone() -> None:
    """It outlives the limit, and ends by itself."""
    with watched("stay", "2.5") as process:
        assert process.wait(60) == 0


def test_a_process_that_ends_its_watchdog_may_stand_still() -> None:
    """The last seconds of a replica are not watched."""
    with watched("end", "60") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ended\n"
        os.kill(process.pid, signal.SIGSTOP)
        time.sleep(1.5)
        assert process.poll() is None
        process.kill()
