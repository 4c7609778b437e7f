"""The rate of many streams through `ropewalk route` beside the rate of its server alone.

    ropewalk serve --port 8100 & ropewalk route http://127.0.0.1:8100 --port 8200 &
    python -m benchmarks.router http://127.0.0.1:8100 http://127.0.0.1:8200

Both are asked in turns, so that the load of the machine is the same for both.
"""

import asyncio
import json
import statistics
import time
from urllib.parse import urlsplit

import click

from ropewalk.server.router.upstream import Pool, Target

_EVENT = b"data: "


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


@click.command()
@click.argument("server")
@click.argument("router")
@click.option("--streams", "num_streams", default=32, show_default=True)
@click.option("--tokens", "num_tokens", default=128, show_default=True)
@click.option("--rounds", "num_rounds", default=5, show_default=True)
def main(server: str, router: str, num_streams: int, num_tokens: int, num_rounds: int) -> None:
    """Measure the server at SERVER, and the router in front of it at ROUTER."""

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
