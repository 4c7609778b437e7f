"""The page behind a proxy, before the model is loaded, under load, and after many answers."""

import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from playwright.sync_api import Browser, expect

from ropewalk.server.terminal.top import quantile
from tests.playground.conftest import Watched, watched
from tests.servers.processes import Server, command

PREFIX = "/models/rope"


def _handler_to(url: str) -> type[BaseHTTPRequestHandler]:
    """A proxy's handler, which serves another server under PREFIX, streams included."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Forward."""
            self._forward()

        def do_POST(self) -> None:
            """Forward."""
            self._forward()

        def _forward(self) -> None:
            if not self.path.startswith(PREFIX):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            skipped = {"host", "connection", "content-length"}
            headers = {k: v for k, v in self.headers.items() if k.lower() not in skipped}
            target = url + self.path.removeprefix(PREFIX)
            with httpx.stream(
                self.command, target, content=body, headers=headers, timeout=60
            ) as answer:
                self.send_response(answer.status_code)
                for name, value in answer.headers.items():
                    if name not in {"connection", "transfer-encoding", "content-length"}:
                        self.send_header(name, value)
                self.end_headers()
                for piece in answer.iter_raw():
                    self.wfile.write(piece)
                    self.wfile.flush()

        def log_message(self, *_: object) -> None:
            """Stay silent."""

    return Handler


@pytest.fixture
def proxied(server: Server) -> Iterator[str]:
    """The address of the shared server behind a proxy."""
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), _handler_to(server.url))
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{proxy.server_port}{PREFIX}"
    proxy.shutdown()
    proxy.server_close()


def test_the_page_works_under_a_prefix(browser: Browser, proxied: str) -> None:
    """Every address is relative, also that of the redirect and of the curl snippet."""
    context = browser.new_context()
    found = watched(context.new_page())
    page = found.open(f"{proxied}/")
    assert page.url == f"{proxied}/playground/"
    page.fill("#prompt", "x = 1\n")
    page.fill("#max-tokens", "3")
    found.send()
    assert f"'{proxied}/v1/completions'" in (page.locator("#code").text_content() or "")
    expect(page.locator("#load")).to_contain_text("running")
    assert all(url.startswith(proxied) for url in found.urls)
    assert found.complaints == []
    context.close()


@pytest.mark.long
def test_a_page_opened_while_the_model_loads_becomes_ready(browser: Browser) -> None:
    """The page is served before the model, tells the phase, and starts by itself."""
    process = subprocess.Popen(command("serve", "--port", "0"), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        address = re.search(r"(http://\S+) answers 503", process.stderr.readline())
        assert address
        reader = threading.Thread(target=process.stderr.read)
        reader.start()
        context = browser.new_context()
        found = watched(context.new_page())
        found.page.goto(f"{address[1]}/playground/")
        expect(found.page.locator("#server-state")).to_contain_text("loading")
        expect(found.page.locator("#server-state")).to_have_text("ready", timeout=120_000)
        found.page.fill("#prompt", "x = 1\n")
        found.page.fill("#max-tokens", "2")
        found.send()
        # The browser itself reports each 503 of /ready.
        assert all("503" in complaint for complaint in found.complaints)
        context.close()
    finally:
        process.terminate()
        process.wait(60)
        reader.join()
        process.stderr.close()


@pytest.mark.alone  # it is about milliseconds
@pytest.mark.long
def test_the_first_paint_is_early_while_the_engine_is_busy(
    browser: Browser, server: Server
) -> None:
    """It takes less than half a second on loopback beside eight streams."""
    body = {"prompt": "x", "n": 8, "max_tokens": 800, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
        assert answer.is_success
        paints = []
        for _ in range(3):
            context = browser.new_context()
            page = context.new_page()
            page.goto(f"{server.url}/playground/")
            expect(page.locator("#prompt")).to_be_visible()
            paints.append(
                page.evaluate(
                    "() => performance.getEntriesByName('first-contentful-paint')[0].startTime"
                )
            )
            context.close()
    assert sorted(paints)[1] < 500


_MANY = """async () => {
  const { Answer } = await import("./answer.js");
  const { noteOwn, noteStats, drawChart } = await import("./chart.js");
  const stats = await (await fetch("../stats")).json();
  const event = {choices: [{index: 0, text: "word ".repeat(50), finish_reason: "stop"}],
                 usage: {prompt_tokens: 9, completion_tokens: 50}};
  const stream = `data: ${JSON.stringify(event)}\\n\\ndata: [DONE]\\n\\n`;
  window.fetch = async () => new Response(stream);
  const answer = new Answer(document.getElementById("answer-a"));
  const sizes = [];
  for (let at = 0; at <= 1000; at += 1) {
    await answer.run({path: "v1/completions", body: {}}, null, null);
    noteOwn(9, answer.firstSeconds, answer.tokenSeconds);
    noteStats(stats, performance.now() + at * 2000);
    drawChart();
    if (at % 500 === 0) {
      sizes.push([document.querySelectorAll(":not(svg *)").length,
                  document.querySelectorAll("svg *").length]);
    }
  }
  return sizes;
}"""


@pytest.mark.long
def test_a_thousand_answers_do_not_grow_the_page(opened: Watched) -> None:
    """The document stops growing, and the heap stays within a few megabytes."""
    session = opened.page.context.new_cdp_session(opened.page)

    def heap() -> float:
        session.send("HeapProfiler.collectGarbage")
        metrics = session.send("Performance.getMetrics")["metrics"]
        return next(each["value"] for each in metrics if each["name"] == "JSHeapUsedSize")

    session.send("Performance.enable")
    before = heap()
    _, middle, end = opened.page.evaluate(_MANY)
    assert end[0] == middle[0]
    assert end[1] < middle[1] + 50  # axes have a tick more or less; a leak has a node an answer
    assert heap() - before < 4e6


def test_the_page_computes_prometheus_quantiles(opened: Watched) -> None:
    """Equal to those of the terminal, which a test compares with promtool."""
    bounds = [0.001, 0.01, 0.1, 1.0, 10.0]
    cases = [[0, 3, 3, 50, 60, 60], [1, 1, 1, 1, 1, 2], [0, 0, 0, 0, 0, 5], [7, 8, 9, 9, 90, 91]]
    for counts in cases:
        for q in (0.1, 0.5, 0.95, 0.99):
            shown = opened.page.evaluate(
                "async ([q, bounds, counts]) =>"
                " (await import('./quantiles.js')).quantile(q, bounds, counts)",
                [q, bounds, counts],
            )
            assert shown == quantile(q, bounds, counts)
