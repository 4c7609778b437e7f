"""The Grafana dashboard: its panels, and its queries as Grafana would send them."""

import json
from dataclasses import dataclass
from typing import Any

from tests.docker.files import DOCKER

DASHBOARD = json.loads((DOCKER / "grafana/dashboards/ropewalk.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
# Grafana's own values. Its rate interval is at least four scrapes; 60 s spans a test's whole load.
_VARIABLES = {"$__rate_interval": "60s", "$__range": "120s", "$instance": ".+", "$model": ".+"}


@dataclass(frozen=True)
class Query:
    """One query of a panel."""

    panel: str
    ref: str
    expression: str
    is_instant: bool

    def __str__(self) -> str:
        """The query's name in test ids."""
        return f"{self.panel}, {self.ref}"

    def substituted(self) -> str:
        """The expression without Grafana's variables."""
        expression = self.expression
        for name, value in _VARIABLES.items():
            expression = expression.replace(name, value)
        assert "$" not in expression, expression
        return expression


QUERIES = [
    Query(panel["title"], target["refId"], target["expr"], target["instant"])
    for panel in PANELS
    for target in panel.get("targets", [])
]
