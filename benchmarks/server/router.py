"""The rate of many streams through `ropewalk route` beside the rate of its server alone.

    ropewalk serve --port 8100 & ropewalk route http://127.0.0.1:8100 --port 8200 &
    python -m benchmarks.server.router http://127.0.0.1:8100 http://127.0.0.1:8200

Both are asked in turns, so that the load of the machine is the same for both.

`--prefixes` compares two routers over the same servers: one that chooses by prefix, and one in
turns. Its load is groups of prompts with a common beginning, which one server's cache cannot hold
all of. Each turn has prompts of its own.

    ropewalk route ADDRESSES --port 8200 &
    ropewalk route ADDRESSES --port 8300 --routing round_robin &
    python -m benchmarks.server.router --prefixes http://127.0.0.1:8200 http://127.0.0.1:8300
"""

import asyncio
import json
import random
import statistics
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

import click

from ropewalk.server.router.upstream import Pool, Target

_EVENT = b"data: "
_NUM_IDS = 1000  # of the vocabulary, behind the special tokens
_FIRST_ID = 100


def target_of(url: str) -> Target:
    parts = urlsplit(url)
    host, port = str(parts.hostname), parts.port or 80
    return Target(host, port, f"{host}:{port}")


async def streamed(pool: Pool, body: bytes) -> int:
    """Return the number of events of one stream."""
    headers = [(b"content-type", b"application/json")]
    exchange = await pool.request("POST", "/v1/completions", headers, body)
    try:
        assert exchange.status == 200, await exchange.whole()
        num_events = 0
        while piece := await exchange.read():
            num_events += piece.count(_EVENT)
        return num_events
    finally:
        pool.release(exchange)


async def rate(pool: Pool, num_streams: int, num_tokens: int) -> float:
    """Return the events a second of some streams at once."""
    bodies = [
        json.dumps(
            {
                "prompt": f"import os  # {number}\n",
                "max_tokens": num_tokens,
                "min_tokens": num_tokens,
                "seed": number,
                "stream": True,
            }
        ).encode()
        for number in range(num_streams)
    ]
    began = time.perf_counter()
    found = await asyncio.gather(*(streamed(pool, body) for body in bodies))
    return sum(found) / (time.perf_counter() - began)


@dataclass(frozen=True)
class PrefixLoad:
    """Prompts in groups; those of a group have their first tokens in common."""

    num_groups: int = 18
    num_of_group: int = 8
    prefix_len: int = 1024
    own_len: int = 32
    num_at_once: int = 8
    num_generated: int = 8

    def bodies(self, seed: int) -> list[bytes]:
        """Return the requests in a random order; another seed has no prefix in common."""
        rng = random.Random(seed)  # noqa: S311  # not for secrets

        def tokens(num: int) -> list[int]:
            return [rng.randrange(_FIRST_ID, _FIRST_ID + _NUM_IDS) for _ in range(num)]

        prefixes = [tokens(self.prefix_len) for _ in range(self.num_groups)]
        prompts = [each + tokens(self.own_len) for each in prefixes * self.num_of_group]
        rng.shuffle(prompts)
        fixed = {"max_tokens": self.num_generated, "seed": 1, "stream": True}
        return [json.dumps({"prompt": each, **fixed}).encode() for each in prompts]


@dataclass(frozen=True)
class PrefixTurn:
    """What one turn of the load found."""

    hit_share: float  # of the prompts' tokens, those that a server had cached
    first_token_s: list[float]

    def median_s(self) -> float:
        return statistics.median(self.first_token_s)

    def told(self) -> str:
        last = statistics.quantiles(self.first_token_s, n=20)[-1]
        return f"{self.hit_share:4.0%} {1e3 * self.median_s():6.0f} ms {1e3 * last:6.0f} ms"


async def counted(pool: Pool) -> tuple[float, float]:
    """Return the prompt tokens of all servers so far, and those of them that were cached."""
    exchange = await pool.request("GET", "/metrics")
    page = (await exchange.whole()).decode()
    pool.release(exchange)
    found = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    names = ("ropewalk_prompt_tokens_total", "ropewalk_prompt_tokens_cached_total")
    return float(found[names[0]]), float(found[names[1]])


async def first_token_s(pool: Pool, body: bytes) -> float:
    """Return the time of one stream to its first event, and read it to its end."""
    began, first = time.perf_counter(), 0.0
    exchange = await pool.request(
        "POST", "/v1/completions", [(b"content-type", b"application/json")], body
    )
    try:
        assert exchange.status == 200, await exchange.whole()
        while piece := await exchange.read():
            if not first and _EVENT in piece:
                first = time.perf_counter() - began
        return first
    finally:
        pool.release(exchange)


async def prefix_turn(pool: Pool, load: PrefixLoad, seed: int) -> PrefixTurn:
    """Ask everything once, some at a time."""
    before = await counted(pool)
    places = asyncio.Semaphore(load.num_at_once)

    async def ask(body: bytes) -> float:
        async with places:
            return await first_token_s(pool, body)

    times = await asyncio.gather(*(ask(body) for body in load.bodies(seed)))
    after = await counted(pool)
    return PrefixTurn((after[1] - before[1]) / (after[0] - before[0]), list(times))


async def compare_prefixes(urls: tuple[str, str], load: PrefixLoad, num_rounds: int) -> None:
    """Print each round of two routers: by prefix, and in turns."""
    pools = [Pool(target_of(url), None) for url in urls]
    for pool in pools:
        await prefix_turn(pool, PrefixLoad(4, 4), 1)  # connections are ready
    click.echo("hits, median and 95th percentile to the first token: by prefix | in turns")
    ratios, hits = [], []
    for number in range(num_rounds):
        order = (0, 1) if number % 2 == 0 else (1, 0)
        turns = {at: await prefix_turn(pools[at], load, 10 + 2 * number + at) for at in order}
        ratios.append(turns[0].median_s() / turns[1].median_s())
        hits.append((turns[0].hit_share, turns[1].hit_share))
        click.echo(f"{turns[0].told()} | {turns[1].told()}  ratio {ratios[-1]:.2f}")
    by_prefix, in_turns = (statistics.median(each) for each in zip(*hits, strict=True))
    click.echo(f"medians: hits {by_prefix:.0%} and {in_turns:.0%}", nl=False)
    click.echo(f", ratio of the times {statistics.median(ratios):.2f}")


@click.command()
@click.argument("server")
@click.argument("router")
@click.option("--streams", "num_streams", default=32, show_default=True)
@click.option("--tokens", "num_tokens", default=128, show_default=True)
@click.option("--rounds", "num_rounds", default=5, show_default=True)
@click.option("--prefixes", is_flag=True, help="Two routers: by prefix, and in turns.")
def main(
    server: str, router: str, num_streams: int, num_tokens: int, num_rounds: int, *, prefixes: bool
) -> None:
    """Measure the server at SERVER, and the router in front of it at ROUTER.

    With --prefixes, both are routers over the same servers.
    """
    if prefixes:
        asyncio.run(compare_prefixes((server, router), PrefixLoad(), num_rounds))
        return

    async def measure() -> list[tuple[float, float]]:
        pools = [Pool(target_of(url), None) for url in (server, router)]
        for pool in pools:
            await rate(pool, num_streams, 16)  # connections and code are ready from here on
        found = []
        for number in range(num_rounds):
            order = (0, 1) if number % 2 == 0 else (1, 0)
            rates = {at: await rate(pools[at], num_streams, num_tokens) for at in order}
            found.append((rates[0], rates[1]))
        return found

    found = asyncio.run(measure())
    for alone, routed in found:
        click.echo(f"{alone:8.0f} {routed:8.0f} events/s  ratio {routed / alone:.3f}")
    ratios = [routed / alone for alone, routed in found]
    told = f"{min(ratios):.3f} to {max(ratios):.3f}"
    click.echo(f"median of the ratios: {statistics.median(ratios):.3f} ({told})")


if __name__ == "__main__":
    main()
