"""One server, as far as its router knows it: how to reach it, its state, and what it serves."""

import asyncio
import ssl

from ropewalk.server.router.fleet.facts import Facts
from ropewalk.server.router.upstream import Headers, Pool, Target

_PLACE = b"ropewalk_kv_disk_info{place="
_CACHE_TOKENS = 262_144  # of a server that does not give the size of its cache


class Server:
    """The connections to a server, and its newest state."""

    def __init__(self, target: Target, tls: ssl.SSLContext | None, silence_s: float) -> None:
        self.target = target
        self.pool = Pool(target, tls, silence_s)
        self.is_ready = False
        self.is_new = True  # no check of it has ended
        self.ready_at = 0.0  # the loop's time when it last became so
        self.is_removed = False  # its name no longer resolves to it; its streams go on
        self.facts: Facts | None = None  # what it serves; None: it has not been asked
        self.facts_at = 0.0  # the loop's time
        self.vote: Facts | None = None  # of a doubtful server, until it has been asked
        self.num_cache_tokens = _CACHE_TOKENS
        self.place: str | None = None  # of pages that it shares; None: of none, or not known yet
        self.is_doubtful = asyncio.Event()  # it has to be asked at once
        self.answered_at = asyncio.get_running_loop().time()
        self.problem = "it has not answered yet"
        self.refusal = ""  # why it may take no requests, one of the fleet's REFUSALS; empty: it may

    @property
    def name(self) -> str:
        return self.target.url

    @property
    def heard_at(self) -> float:
        return max(self.answered_at, self.pool.heard_at)

    def note_cache(self, page: bytes) -> None:
        """Note how large the cache is, and what pages it shares, by the page of /metrics."""
        self.place = None
        for line in page.splitlines():
            # The positions come last; a server of an earlier version tells the tokens only.
            if line.startswith((b"ropewalk_kv_cache_tokens ", b"ropewalk_kv_cache_positions ")):
                self.num_cache_tokens = int(float(line.split()[1]))
            elif line.startswith(_PLACE):
                self.place = line.removeprefix(_PLACE).decode(errors="replace")

    async def get(self, path: str, headers: Headers = ()) -> tuple[int, bytes]:
        """Return status and body of a short answer. Raises LostError."""
        exchange = await self.pool.request("GET", path, headers)
        try:
            return exchange.status, await exchange.whole()
        finally:
            self.pool.release(exchange)
