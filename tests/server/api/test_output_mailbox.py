"""The outputs of a step reach the event loop together."""

import asyncio
import threading
from typing import Any

from server.api.output_mailbox import Mailbox


class CountingLoop(asyncio.SelectorEventLoop):
    """An event loop that counts how often another thread woke it."""

    wakes = 0

    def call_soon_threadsafe(self, *arguments: Any, **options: Any) -> asyncio.Handle:
        """Count the call, and pass it on."""
        self.wakes += 1
        return super().call_soon_threadsafe(*arguments, **options)


def test_a_step_wakes_the_loop_once() -> None:
    """Letters are opened in the order of `put`, and not before `send`."""
    loop, mailbox, opened = CountingLoop(), Mailbox(), list[int]()

    def engine() -> None:
        for step in range(3):
            for letter in range(8):
                mailbox.put(loop, lambda number=8 * step + letter: opened.append(number))
            assert len(opened) <= 8 * step
            mailbox.send()
        mailbox.send()
        loop.call_soon_threadsafe(loop.stop)

    thread = threading.Thread(target=engine)
    loop.call_soon(thread.start)
    loop.run_forever()
    thread.join()
    assert opened == list(range(24))
    assert loop.wakes == 3 + 1
    loop.close()


def test_a_loop_that_is_gone_is_passed_over() -> None:
    """A loop may be closed while the process ends; other loops still get their letters."""
    gone, there, mailbox, opened = asyncio.new_event_loop(), CountingLoop(), Mailbox(), list[str]()
    gone.close()
    mailbox.put(gone, lambda: opened.append("gone"))
    mailbox.put(there, lambda: opened.append("there"))
    mailbox.put(there, there.stop)
    mailbox.send()
    there.run_forever()
    assert opened == ["there"]
    there.close()
