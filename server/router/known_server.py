"""One server behind a router, as far as the router knows it."""

import asyncio
import ssl

from ropewalk.server.router.facts import Facts
from ropewalk.server.router.upstream import Headers, Pool, Target

_CACHE_TOKENS = 262_144  # of a server that does not tell the size of its cache


class Server:
    """One server, as far as the router knows it."""

    def __init__(self, target: Target, tls: ssl.SSLContext | None, silence_s: float) -> None:
        self.target = target
        self.pool = Pool(target, tls, silence_s)
        self.is_ready = False
        self.ready_at = 0.0  # the loop's time when it last became so
        self.is_removed = False  # its name no longer resolves to it; its streams go on
        self.facts: Facts | None = None  # what it serves; None: it has not been asked
        self.facts_at = 0.0  # the loop's time
        self.vote: Facts | None = None  # of a doubtful server, until it has been asked
        self.page_order = asyncio.Lock()  # no page of metrics overtakes another one
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

    async def get(self, path: str, headers: Headers = ()) -> tuple[int, bytes]:
        """Return status and body of a short answer. Raises LostError."""
        exchange = await self.pool.request("GET", path, headers)
        try:
            return exchange.status, await exchange.whole()
        finally:
            self.pool.release(exchange)
