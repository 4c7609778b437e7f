"""The servers behind a router: who there is, who is ready, and who agrees with the others."""

import asyncio
import json
import ssl
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress

import structlog

from ropewalk.server.access.assigned_ids import ANSWER_HEADER, KEY_HEADER, new_ids
from ropewalk.server.replicas.choice import ReplicaChoice
from ropewalk.server.replicas.text_chunks import TextChunks
from ropewalk.server.router.body_chunks import CHUNK_TOKENS
from ropewalk.server.router.fleet.facts import Facts, Served, difference, facts_of
from ropewalk.server.router.fleet.fleet_stats import Stats, summed_stats
from ropewalk.server.router.fleet.server import Server
from ropewalk.server.router.upstream import Headers, LostError, Target, targets_of
from ropewalk.server.settings.route_settings import RouteSettings

_READ_S = 2.0  # for metrics and /stats
_RESOLVE_S = 5.0  # between two look-ups of names
_FACTS_LAST_S = 10.0  # a server may read its settings again at any time

REFUSALS = ("listing", "fingerprint", "router_key", "pending")

_log = structlog.get_logger(__name__)


class Fleet:
    """The servers, their states, and the choice among them. One event loop owns it."""

    def __init__(self, settings: RouteSettings) -> None:
        """Know the addresses; `run` looks at them."""
        self._settings = settings
        self._tls = ssl.create_default_context()
        self.servers: dict[str, Server] = {}  # by URL
        self.choice = ReplicaChoice(settings.routing)
        self.agreed: Served | None = None  # by the servers that take requests
        self._changed = asyncio.Event()
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._found: dict[str, list[Target]] = {}  # by address of the settings
        self._unresolved: dict[str, str] = {}  # why an address has no targets now
        self._has_looked_up = False
        self._told: list[Target] = []  # by `tell`
        self._is_mixed = False  # servers that take requests compute on different machines

    @property
    def usable(self) -> list[Server]:
        """Return the servers that take requests."""
        return [self.servers[name] for name in self.choice.replicas]

    def states(self) -> dict[str, str]:
        """Return by URL why a server takes no requests, or `ready`."""
        usable = set(self.choice.replicas)
        return {
            name: "ready" if name in usable else each.problem for name, each in self.servers.items()
        }

    def problems(self) -> dict[str, str]:
        """Return by URL why a server takes no requests, and by name why it is not resolved."""
        not_ready = {name: why for name, why in self.states().items() if why != "ready"}
        return {**self._unresolved, **not_ready}

    def refused(self) -> Mapping[str, int]:
        """Return by reason how many servers may take no requests."""
        num_of = Counter(each.refusal for each in self.servers.values() if not each.is_removed)
        return {reason: num_of[reason] for reason in REFUSALS}

    async def run(self) -> None:
        """Look names up, and watch every server, until cancelled."""
        try:
            while True:
                try:
                    await asyncio.gather(*map(self._look_up, self._settings.servers))
                    self._set(self._known())  # those from before where a look-up fails
                    self._has_looked_up = True
                    self._changed.set()
                except Exception as error:  # noqa: BLE001  # streams depend on this task
                    _log.error("resolve_failed", why=repr(error))
                await asyncio.sleep(_RESOLVE_S)
        finally:
            for each in self._watching.values():
                each.cancel()
            await asyncio.gather(*self._watching.values(), return_exceptions=True)

    def tell(self, targets: Iterable[Target]) -> None:
        """Know these targets from now on, beside those of the settings.

        One that is left out does not come back.
        """
        self._told = list(targets)
        self._set(self._known())

    def _known(self) -> list[Target]:
        found = (target for each in self._settings.servers for target in self._found.get(each, ()))
        return list({target.url: target for target in [*found, *self._told]}.values())

    async def _look_up(self, address: str) -> None:
        """Note the targets of an address, or log once why it has none now."""
        try:
            self._found[address] = await targets_of(address)
        except (OSError, UnicodeError) as error:
            why = f"its name is not resolved: {error}"
            if self._unresolved.get(address) != why:
                _log.warning("name_not_resolved", address=address, why=str(error))
            self._unresolved[address] = why
        else:
            if self._unresolved.pop(address, None) is not None:
                _log.info("name_resolved", address=address)

    def _set(self, targets: Iterable[Target]) -> None:
        """Begin to watch new servers; give no more requests to those that are gone."""
        wanted = {target.url: target for target in targets}
        for name, server in list(self.servers.items()):
            if name not in wanted and not server.is_removed:
                server.is_removed, server.problem = True, "its address is gone"
                self._update()
                _log.info("server_removed", server=name)
        for name, target in wanted.items():
            known = self.servers.get(name)
            if known is not None:
                known.is_removed = False
                continue
            self.servers[name] = Server(target, self._tls, self._settings.silence_seconds)
            self._watching[name] = asyncio.ensure_future(self._watch(self.servers[name]))

    async def _watch(self, server: Server) -> None:
        """Ask a server again and again how it is; forget it when it is removed and idle."""
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            try:
                await self._check(server)
            except Exception as error:  # noqa: BLE001  # without its watch a server is never ready
                self._note(server, is_ready=False, problem=f"its check failed: {error!r}")
            if server.is_removed and not server.pool.num_open:
                self._forget(server)
                return
            server.is_doubtful.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(began + self._settings.check_seconds):
                    await server.is_doubtful.wait()

    def _forget(self, server: Server) -> None:
        del self.servers[server.name], self._watching[server.name]
        server.pool.lose("its address is gone")

    async def _check(self, server: Server) -> None:
        try:
            await self._ask(server)
        finally:
            server.vote = None

    async def _ask(self, server: Server) -> None:
        silence_s, loop = self._settings.silence_seconds, asyncio.get_running_loop()
        try:
            async with asyncio.timeout(silence_s):
                status, _ = await server.get("/ready")
            server.answered_at = loop.time()
        except TimeoutError:
            if loop.time() - server.heard_at >= silence_s:
                self.lost(server, f"it was silent for {silence_s:g} s")
            return
        except LostError as error:
            if loop.time() - server.heard_at >= silence_s:
                self.lost(server, str(error))  # an open connection may tell nothing of it
            self._note(server, is_ready=False, problem=str(error))
            server.facts, server.refusal = None, ""
            return
        if status != 200:
            server.refusal = ""
            self._note(server, is_ready=False, problem=f"its /ready answers {status}")
        elif await self._is_known(server):
            self._note(server, is_ready=True, problem="")

    async def _is_known(self, server: Server) -> bool:
        """Return whether it is known what a server serves; ask, if not or not lately."""
        is_old = asyncio.get_running_loop().time() - server.facts_at > _FACTS_LAST_S
        if server.facts is not None and not is_old:
            return True
        try:
            async with asyncio.timeout(self._settings.silence_seconds):
                await self._learn(server)
        except TimeoutError:
            if not server.is_ready:
                self._refuse(server, "pending", "its /v1/models does not answer")
            return False
        except LostError:
            return False
        except ValueError:
            self._note(server, is_ready=False, problem="its /v1/models is not JSON")
            return False
        return True

    async def read(self, server: Server, path: str, credentials: Headers) -> tuple[int, bytes]:
        """Return status and body of a server's short answer, by a client's credentials.

        A server that does not answer in time has 503.
        """
        with suppress(TimeoutError, LostError):
            async with asyncio.timeout(_READ_S):
                return await server.get(path, self._passed_on(credentials))
        return 503, b""

    async def stats(self, credentials: Headers) -> Stats | None:
        """Return the sum of the /stats of the servers that take requests.

        None if there is none, or if a server refuses the credentials.
        """
        answers = [self.read(each, "/stats", credentials) for each in self.usable]
        found = await asyncio.gather(*answers)
        if {401, 403} & {status for status, _ in found}:
            return None
        stats = [json.loads(content) for status, content in found if status == 200]
        return summed_stats(stats) if stats else None

    def _passed_on(self, headers: Headers) -> Headers:
        """Return a client's headers as a server gets them that asks for the router's key."""
        if self._settings.router_key is None:
            return headers
        told = (ANSWER_HEADER.encode(), new_ids(0).header().encode())
        return [*headers, told, *self._own_headers()]

    def _own_headers(self) -> Headers:
        key = self._settings.router_key
        return [] if key is None else [(KEY_HEADER.encode(), key.encode())]

    async def _learn(self, server: Server) -> None:
        """Ask what a server serves, and how large its cache is. Raises LostError."""
        status, body = await server.get("/v1/models", self._own_headers())
        if status == 200:
            has_key = self._settings.router_key is not None
            server.facts = facts_of(json.loads(body), has_key=has_key)
        else:
            # API keys, and no router key: the listings cannot be read.
            server.facts = Facts("" if status == 401 else f"status {status}")
        if status == 403:
            server.facts = None
            self._refuse(server, "router_key", "its router_key is another one")
            self._note(server, is_ready=False, problem=server.problem)
            raise LostError(server.problem)
        server.facts_at = asyncio.get_running_loop().time()
        status, page = await server.get("/metrics", self._own_headers())
        if status == 200:
            server.note_cache(page)

    def _note(self, server: Server, *, is_ready: bool, problem: str) -> None:
        if is_ready and not server.is_ready:
            server.ready_at = asyncio.get_running_loop().time()
        if server.is_new and not is_ready and not server.refusal:
            _log.warning("server_not_ready", server=server.name, why=problem)
        if server.is_new:
            self._changed.set()
        server.is_new = False
        server.is_ready, server.problem = is_ready, problem
        self._update()

    def _update(self) -> None:
        """Set who takes requests: the ready servers that serve what most of them serve."""
        ready = [each for each in self.servers.values() if each.is_ready and not each.is_removed]
        agreed = self._majority(ready)
        if agreed != self.agreed:
            for each in ready:
                each.refusal = ""  # the log names what it differs from now
        self.agreed = agreed
        usable = []
        for each in ready:
            if each.facts is None or self.agreed is None:
                continue
            if each.facts.served == self.agreed:
                each.refusal = ""
                usable.append(each)
            else:
                self._refuse(each, *difference(each.facts.served, self.agreed))
        self._tell_mixed({each.facts.arithmetic for each in usable if each.facts is not None})
        names = {each.name: max(1, each.num_cache_tokens // CHUNK_TOKENS) for each in usable}
        if set(names) != set(self.choice.replicas):
            for name in set(names) - set(self.choice.replicas):
                _log.info("server_ready", server=name)
            for name in set(self.choice.replicas) - set(names):
                problem = self.servers[name].problem if name in self.servers else "gone"
                _log.warning("server_not_ready", server=name, why=problem)
            self.choice.update(names, {each.name: each.place for each in usable})
            self._changed.set()
        for each in usable:
            self.choice.add(each.name, names[each.name], each.place)

    def _majority(self, ready: Sequence[Server]) -> Served | None:
        """Return what most servers serve; a tie changes nothing."""
        voting = [each.facts for each in ready]
        voting += [each.vote for each in self.servers.values() if not each.is_removed]
        num_of = Counter(facts.served for facts in voting if facts is not None)
        most = max(num_of.values(), default=0)
        leading = [served for served, num in num_of.items() if num == most]
        return self.agreed if self.agreed in leading or not leading else leading[0]

    def _tell_mixed(self, found: set[tuple[str, ...]]) -> None:
        """Log once if streams of some servers cannot go on at others."""
        if len(found) > 1 and not self._is_mixed:
            told = "servers differ in `arithmetic`, so a stream goes on at its equals only"
            _log.warning("servers_compute_differently", why=told)
        self._is_mixed = self._is_mixed or len(found) > 1

    def _refuse(self, server: Server, refusal: str, problem: str) -> None:
        """Note, and log once, why a server that is ready takes no requests."""
        if server.refusal != refusal:
            _log.warning("server_refused", server=server.name, why=problem)
        server.refusal, server.problem = refusal, problem

    def lost(self, server: Server, why: str) -> None:
        """Note that a server is gone: its streams go on elsewhere, and it must be ready again."""
        server.pool.lose(why)
        self.doubt(server, why)

    def doubt(self, server: Server, why: str) -> None:
        """Give a server no more requests until its /ready, asked at once, says so again."""
        if server.is_ready:
            server.vote = server.facts
        server.facts, server.refusal = None, ""
        self._note(server, is_ready=False, problem=why)
        server.is_doubtful.set()

    async def ready(self) -> None:
        """Return when a server takes requests."""
        while not self.usable:
            self._changed.clear()
            await self._changed.wait()

    async def first_look(self, limit_s: float) -> None:
        """Return when a server takes requests, or all have been checked once, or after a limit."""
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not self.usable and self._has_unchecked:
                    self._changed.clear()
                    await self._changed.wait()

    @property
    def _has_unchecked(self) -> bool:
        return not self._has_looked_up or any(each.is_new for each in self.servers.values())

    async def pick(
        self,
        request_id: str,
        asked: TextChunks,
        avoid: Callable[[Server], bool],
        limit_s: float,
    ) -> Server | None:
        """Return the best server that is not to be avoided, and count the request on it.

        None if there is none within `limit_s` seconds.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while (found := self.pick_now(request_id, asked, avoid)) is None:
                    self._changed.clear()
                    await self._changed.wait()
                return found
        return None

    def pick_now(
        self, request_id: str, asked: TextChunks, avoid: Callable[[Server], bool]
    ) -> Server | None:
        """Return the best server that is not to be avoided, or None if there is none."""
        allowed = [each.name for each in self.usable if not avoid(each)]
        ranked = self.choice.rank(asked, allowed, request_id)
        if not ranked:
            return None
        self.choice.routed(request_id, asked, ranked[0])
        return self.servers[ranked[0]]
