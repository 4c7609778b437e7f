"""The outputs of a step reach the event loop together."""

import asyncio
import threading
from typing import Any

from ropewalk.server.api.output_queue import OutputQueue


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts how often another thread woke it."""

    wakes = 0

    def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> asyncio.Handle:
        """Count the call, and pass it on."""
        self.wakes += 1
        return super().call_soon_threadsafe(*arguments, **options)


def test_a_step_wakes_the_loop_once() -> None:
    """Callbacks run in the order of `put`, and not before `flush`."""
    loop, queue, opened = CountingLoop(), OutputQueue(), list[int]()

    def engine() -> None:
        for step in range(3):
            for callback in range(8):
                queue.put(loop, lambda number=8 * step + callback: opened.append(number))
            assert len(opened) <= 8 * step
            queue.flush()
        queue.flush()
        loop.call_soon_threadsafe(loop.stop)

    thread = threading.Thread(target=engine)
    loop.call_soon(thread.start)
    loop.run_forever()
    thread.join()
    assert opened == list(range(24))
    assert loop.wakes == 3 + 1
    loop.close()


def test_a_loop_that_is_gone_is_passed_over() -> None:
    """A loop may be closed while the process ends; other loops still get their callbacks."""
    gone, there, queue, opened = (
        asyncio.new_event_loop(),
        CountingLoop(),
        OutputQueue(),
        list[str](),
    )
    gone.close()
    queue.put(gone, lambda: opened.append("gone"))
    queue.put(there, lambda: opened.append("there"))
    queue.put(there, there.stop)
    queue.flush()
    there.run_forever()
    assert opened == ["there"]
    there.close()
