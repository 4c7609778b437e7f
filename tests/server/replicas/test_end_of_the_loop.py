"""Work on a loop of another thread that a signal may end."""

import asyncio
import threading

from ropewalk.server.ray.serving import _run_on


def test_a_loop_that_has_ended_runs_nothing_and_raises_nothing() -> None:
    """It is closed, or stopped before the work was begun."""
    begun = []

    async def work() -> None:
        begun.append(True)

    serving = threading.Thread(target=int)
    serving.start()
    serving.join()
    stopped = asyncio.new_event_loop()
    _run_on(stopped, work(), serving)
    stopped.run_until_complete(asyncio.sleep(0))  # the work that was left
    stopped.close()
    assert begun == [True]
    _run_on(stopped, work(), serving)
    assert begun == [True]
