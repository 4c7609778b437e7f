"""Reads the metrics of a server, or of a router and the servers behind it."""

from collections.abc import Iterable

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.servers.processes import Server


def samples_of(server: Server) -> list[Sample]:
    """Samples of its page, then of the page of each server behind it."""
    found: list[Sample] = []
    with httpx.Client(base_url=server.url, timeout=30) as client:
        asked: list[dict[str, str]] = [{}]
        targets = client.get("/metrics/servers")
        if targets.is_success:  # a router with a server that is ready
            asked += [{"server": each["labels"]["__param_server"]} for each in targets.json()]
        for parameters in asked:
            page = client.get("/metrics", params=parameters)
            for family in text_string_to_metric_families(page.text) if page.is_success else ():
                found += family.samples
    return found


def total(samples: Iterable[Sample], name: str, **labels: str) -> float:
    """The sum of a name's samples that have these labels, over all others and all servers."""
    return sum(
        sample.value
        for sample in samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
