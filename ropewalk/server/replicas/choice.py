"""The choice of a replica, by cost in tokens. Plain Python: no HTTP, no network, no clock.

cost = tokens that queue for prefill there + tokens of this prompt that are not cached there
       + tokens in pages that it evicts there + decode_weight x requests that generate there

An evicted token is one that a later request computes anew, so it counts like one of this prompt.
Replicas of the same age are all full, so the term keeps prompts where their pages are.

Replicas may share a place of pages that outlive the cache (docs/guide/prefix-store.md). A token
that any of them has had is read there by the others, and so is an evicted one. Both count
`_READ_WEIGHT`.

A prefix that many requests share spills to a second replica when its queue costs more than reading
the prefix anew. From then on two replicas have it cached. Routers of others use a threshold of
imbalance beside the match. Beyond it they drop all affinity at once, so hits collapse under load.
"""

import hashlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Literal, get_args

from ropewalk.server.replicas.text_chunks import PageMemory, TextChunks

Routing = Literal["prefix", "least_loaded", "round_robin"]
DECODE_WEIGHT = 32.0  # tokens of prefill that one generating request is worth
# Tokens of prefill that the read of one token is worth. A slow disk took 1/30 of the computation of
# 8,192 tokens, and its first pages take longer.
_READ_WEIGHT = 0.1
_SHARED_PAGES = 1 << 16  # remembered of a shared place; the router does not know its size
_MOST_LEFT = 8  # places without a replica whose pages are remembered; their replicas may come back


@dataclass(slots=True)
class _Open:
    """A request between `routed` and `ended`."""

    replica: str
    num_queued: (
        int  # prompt tokens that the replica probably computes, or as many as its reads cost
    )
    is_running: bool = False  # its first token came


@dataclass(slots=True)
class _Replica:
    """A replica as one router knows it."""

    memory: PageMemory
    place: str | None = None  # of pages that it shares with others; None: it shares none
    num_queued_tokens: int = 0  # of prompts of requests without a first token, as in `_Open`
    num_running: int = 0  # requests with a first token
    open_ids: set[str] = field(default_factory=set)  # of both kinds


class ReplicaChoice:
    """The replicas that a router knows, their load, and the order in which a request tries them.

    Each routing process has one, and counts only its own requests. Not thread-safe: one event loop
    owns it.
    """

    def __init__(self, routing: Routing = "prefix", decode_weight: float = DECODE_WEIGHT) -> None:
        """Create a choice without replicas. Raises ValueError for an unknown `routing`.

        decode_weight: the cost of a generating request, in prompt tokens.
        """
        if routing not in get_args(Routing):
            accepted = ", ".join(get_args(Routing))
            raise ValueError(f"routing must be one of {accepted}. Given: {routing}")
        self.routing = routing
        self.decode_weight = decode_weight
        self._replicas: dict[str, _Replica] = {}
        self._places: dict[str, PageMemory] = {}  # the pages of each shared place
        self._open: dict[str, _Open] = {}
        self._turn = itertools.count()  # of round_robin

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self._replicas)

    @property
    def num_open(self) -> int:
        """Return the number of requests that count as load."""
        return len(self._open)

    def add(self, replica: str, num_pages: int, place: str | None = None) -> None:
        """Add a replica whose cache holds `num_pages` pages; of a known one, only note its place.

        place: that of pages which outlive its cache, equal for replicas that share it.
        """
        if replica not in self._replicas:
            self._replicas[replica] = _Replica(PageMemory(num_pages))
        self._replicas[replica].place = place
        if place is not None and place not in self._places:
            self._places[place] = PageMemory(_SHARED_PAGES)
            used = {each.place for each in self._replicas.values()}
            left = [each for each in self._places if each not in used]
            for each in left[:-_MOST_LEFT]:  # an upgrade of the fleet makes new places
                del self._places[each]

    def remove(self, replica: str) -> None:
        """Remove a replica with its load and its pages; no effect if it is unknown."""
        known = self._replicas.pop(replica, None)
        for request_id in known.open_ids if known else ():
            del self._open[request_id]

    def update(
        self, num_pages: dict[str, int], places: Mapping[str, str | None] = MappingProxyType({})
    ) -> None:
        """Add and remove replicas, so that exactly these remain. Pages of the cache by id.

        places: of pages that outlive a replica's cache, by id.
        """
        for replica in set(self._replicas) - num_pages.keys():
            self.remove(replica)
        for replica, num in num_pages.items():
            self.add(replica, num, places.get(replica))

    def load(self, replica: str) -> tuple[int, int]:
        """Return a replica's queued prefill tokens and its running requests; (0, 0) if unknown."""
        known = self._replicas.get(replica)
        return (known.num_queued_tokens, known.num_running) if known else (0, 0)

    def num_remembered(self, replica: str) -> int:
        known = self._replicas.get(replica)
        return len(known.memory) if known else 0

    def cost(self, asked: TextChunks, replica: str) -> float:
        """Return the cost of a prompt on a replica, in tokens."""
        known = self._replicas.get(replica)
        if known is None:
            return asked.num_tokens
        evicted: float = known.memory.num_evicted_by(asked.keys) * asked.chunk_size
        if known.place is not None:
            evicted *= _READ_WEIGHT
        num_computed, num_read = self._num_uncached(asked, known)
        work = known.num_queued_tokens + num_computed + _READ_WEIGHT * num_read + evicted
        return work + self.decode_weight * known.num_running

    def rank(self, asked: TextChunks, candidates: Iterable[str], request_id: str) -> list[str]:
        """Return the candidates, best first. It changes no load: `routed` does.

        request_id: places a prompt without a full page. Prompts with one follow their first page,
        so routers that know nothing yet agree.
        """
        ids = list(candidates)
        if self.routing == "round_robin":
            ids.sort()
            start = next(self._turn) % len(ids) if ids else 0
            return ids[start:] + ids[:start]
        if self.routing == "least_loaded":
            place = request_id.encode()
            return sorted(ids, key=lambda each: (self._num_open(each), _rendezvous(place, each)))
        place = asked.keys[0] if asked.keys else request_id.encode()

        def order(replica: str) -> tuple[float, int, bytes]:
            # The emptiest is safe as a tie-break only. As a rule it would send every new prompt to
            # the replica that was just replaced.
            emptiness = self.num_remembered(replica)
            return self.cost(asked, replica), emptiness, _rendezvous(place, replica)

        return sorted(ids, key=order)

    def routed(self, request_id: str, asked: TextChunks, replica: str) -> int:
        """Count a request as queued on a replica; return how many tokens it need not compute.

        They are cached there, or in the place of pages that the replica shares.
        A request that is already open moves, because one request is tried on one replica at a time.
        An unknown replica, which may just have gone, counts nothing.
        """
        self.ended(request_id)
        known = self._replicas.get(replica)
        if known is None:
            return 0
        num_computed, num_read = self._num_uncached(asked, known)
        known.memory.note(asked.keys)
        if known.place is not None:
            self._places[known.place].note(asked.keys)
        num_queued = num_computed + round(_READ_WEIGHT * num_read)
        known.num_queued_tokens += num_queued
        known.open_ids.add(request_id)
        self._open[request_id] = _Open(replica, num_queued)
        return asked.num_tokens - num_computed

    def first_token(self, request_id: str) -> None:
        """Move a request from the queue to the running ones; no effect if it is not queued."""
        request = self._open.get(request_id)
        if request is None or request.is_running:
            return
        replica = self._replicas[request.replica]
        replica.num_queued_tokens -= request.num_queued
        replica.num_running += 1
        request.is_running = True

    def ended(self, request_id: str) -> None:
        """Take a request's load back, however it ended; no effect if it is not open."""
        request = self._open.pop(request_id, None)
        if request is None:
            return
        replica = self._replicas[request.replica]
        replica.open_ids.remove(request_id)
        if request.is_running:
            replica.num_running -= 1
        else:
            replica.num_queued_tokens -= request.num_queued

    def _num_open(self, replica: str) -> int:
        known = self._replicas.get(replica)
        return len(known.open_ids) if known else 0

    def _num_uncached(self, asked: TextChunks, replica: _Replica) -> tuple[int, int]:
        """Return how many prompt tokens a replica probably computes, and how many it reads."""
        keys = asked.reusable_keys
        num_cached = replica.memory.match(keys)
        num_known = num_cached
        if replica.place is not None:
            num_known = max(num_cached, self._places[replica.place].match(keys))
        num_computed = asked.num_tokens - num_known * asked.chunk_size
        return num_computed, (num_known - num_cached) * asked.chunk_size


def _rendezvous(place: bytes, replica: str) -> bytes:
    """Return the rank of a replica for a place; the smallest of all replicas is chosen.

    Rendezvous hashing (Thaler and Ravishankar, 1998): a replica that leaves moves only the places
    that it had.
    """
    return hashlib.sha256(place + b"\0" + replica.encode()).digest()
