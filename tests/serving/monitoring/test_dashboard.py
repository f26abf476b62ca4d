"""/dashboard in a real browser, over a real server: its text and its pixels."""

import asyncio
import contextlib
import http.server
import json
import shutil
import subprocess
import threading
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.monitoring import live
from gimbal_jax.serving.monitoring.live import PAGE, LiveView
from gimbal_jax.serving.monitoring.operators import serve_operators
from gimbal_jax.serving.monitoring.request_metrics import RequestHistograms
from tests.serving.core.ticked_core import wait_for
from tests.serving.fake_server import CONFIG, PLACEMENT, FakeCore
from tests.serving.live_server import live_server
from tests.serving.monitoring.test_live_snapshot import RECORD

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium")
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--force-device-scale-factor=1"),
)
TIMES = "\N{MULTIPLICATION SIGN}"
END = "look();\n</script>"
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><b id=evil>x</b>"


def chromium(folder, url, *options, budget_ms=2500):
    """Return what Chromium prints of a page after ``budget_ms`` of its virtual time."""
    command = [
        CHROMIUM,
        *QUIET,
        f"--user-data-dir={folder}/profile",
        f"--virtual-time-budget={budget_ms}",
        *options,
        url,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


class Page(HTMLParser):
    """Parsed page: text of each element with an id, table rows by the id of their body, and all tags."""

    def __init__(self, text):
        super().__init__()
        self.text, self.rows, self.tags, self.title = {}, {}, [], ""
        self._open, self._attributes = [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag in ("meta", "link", "br", "img", "path"):
            return
        self._open.append((tag, dict(attributes)))
        ids = [attributes.get("id") for _, attributes in self._open]
        if tag == "tr" and ids[-2]:
            self.rows.setdefault(ids[-2], []).append([])
        if tag == "td" and ids[-3]:
            self.rows[ids[-3]][-1].append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop()[0] != tag:
            pass

    def handle_data(self, data):
        if self._open and self._open[-1][0] == "title":
            self.title += data
        for _, attributes in self._open:
            if "id" in attributes:
                self.text[attributes["id"]] = self.text.get(attributes["id"], "") + data
        for (tag, _), (_, body) in zip(self._open[::-1], self._open[::-1][2:], strict=False):
            if tag == "td" and "id" in body:
                self.rows[body["id"]][-1][-1] += data

    def count(self, tag, name):
        return sum(found == tag and name in attributes.get("class", "").split() for found, attributes in self.tags)


@contextlib.contextmanager
def shown(core, *records):
    """Yield the address of the operators' HTTP over an idle core, after these requests have ended."""

    async def make():
        frontend = Frontend(core, lambda: 100.0)
        view = LiveView(frontend, HOSTILE)
        for record in records:
            view.observe(record)
        return frontend, view

    frontend, view = asyncio.run(make())
    with serve_operators(frontend, view, RequestHistograms(CONFIG), "127.0.0.1", 0, lambda: True) as port:
        yield f"http://127.0.0.1:{port}/dashboard"


@contextlib.contextmanager
def page_with(script, answer):
    """Yield the address of the page with more script at its end and data from ``answer()``, without its policy."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            body = PAGE.decode().replace(END, f"look();\n{script}</script>").encode()
            status = 200
            if self.path == "/dashboard/data":
                data = answer()
                status, body = (503, b"") if data is None else (200, json.dumps(data).encode())
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments):
            pass

    assert END in PAGE.decode()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/dashboard"
        server.shutdown()
        thread.join()


def snapshot_of(core, *records):
    async def make():
        view = LiveView(Frontend(core, lambda: 100.0), "small")
        for record in records:
            view.observe(record)
        return view

    return asyncio.run(make()).snapshot()


def test_page_shows_a_served_load(tmp_path, monkeypatch):
    monkeypatch.setattr(live, "FRESH_S", 0.0)
    with live_server(HOSTILE) as server:
        for future in [server.generate(f"{HOSTILE}-{number}", (7, 7, 7, 7), max_tokens=1) for number in range(30)]:
            future.result(60)
        server.server.rebalance()
        wait_for(lambda: server.server.rebalancer.records)
        wait_for(lambda: not any(engine["running"] for engine in server.view.snapshot()["engines"]))
        page = Page(chromium(tmp_path, f"{server.url}/dashboard", "--dump-dom"))
        snapshot = server.view.snapshot()
    assert page.text["state"] == "● serving"
    assert page.text["model"] == HOSTILE
    assert page.text["mesh"] == f"2 {TIMES} 2 = 4 ranks"
    assert page.text["notices"] == "✓ All well"
    assert page.count("article", "engine") == 2
    assert "Engine 0" in page.text["engines"] and "Engine 1" in page.text["engines"]
    experts = snapshot["experts"]
    for layer, row in enumerate(page.rows["layers"]):
        tokens = experts["tokens_LP"][layer]
        hottest = tokens.index(max(tokens))
        assert row[:3] == [str(layer), f"{sum(tokens):,}", f"{experts['imbalance_L'][layer]:.2f}{TIMES}"]
        assert row[4:6] == [str(experts["expert_LP"][layer][hottest]), f"{100 * max(tokens) / sum(tokens):.1f} %"]
    assert len(page.rows["layers"]) == 2
    decisions = snapshot["placement"]["decisions"]
    assert len([tag for tag, _ in page.tags if tag == "li"]) == len(decisions) > 0
    assert {row[0] for row in page.rows["requests"]} == {row["id"] for row in snapshot["requests"]}
    assert sum(int(row[2]) for row in page.rows["rules"]) == 30
    # Text from clients stays text.
    assert page.title == f"gimbal {HOSTILE}"
    assert not [tag for tag, attributes in page.tags if tag == "img" or attributes.get("id") == "evil"]


@pytest.mark.parametrize(
    ("state", "mark", "notice"),
    [
        ("warming", "◌ warming up", "Warming up: programs are being compiled"),
        ("draining", "◐ draining", "Draining: running requests continue"),
        ("failed", "✕ failed", f"The engine failed: {HOSTILE}"),
    ],
)
def test_page_shows_the_state_and_escapes_text(tmp_path, state, mark, notice):
    class Core(FakeCore):
        def status(self):
            decision = replace(PLACEMENT, outcome="failed", reason=HOSTILE)
            status = super().status()
            return replace(status, error=HOSTILE, placement=replace(status.placement, records=(decision,)))

    with shown(Core(state=state), replace(RECORD, outcome="error", error=HOSTILE)) as url:
        page = Page(chromium(tmp_path, url, "--dump-dom"))
    assert page.text["state"] == mark
    assert notice in page.text["notices"]
    assert page.title == f"! gimbal {HOSTILE}"
    assert HOSTILE in page.text["changes"]
    assert page.rows["requests"][0][2] == f"error: {HOSTILE}"
    assert "no trace yet" in page.text["engines"]
    assert not [tag for tag, attributes in page.tags if tag == "img" or attributes.get("id") == "evil"]


def test_heat_map_has_the_colours_of_the_shares(tmp_path):
    """Two of four experts have all the traffic, so one half has the colour of 2x and the other that of nothing."""

    class Core(FakeCore):
        def status(self):
            counts_LSE = np.zeros((2, 2, 4), np.int64)
            counts_LSE[:, :, 2:] = 50
            slots_LE = np.array([[0, 1, 2, 3], [0, 1, 2, 3]], np.int32)
            status = super().status()
            placement = replace(status.placement, window_counts_LSE=counts_LSE, slot_of_expert_LE=slots_LE)
            return replace(status, placement=placement)

    with shown(Core()) as url:
        for scheme, hot, cold in (("1", (244, 191, 135), (33, 102, 172)), ("0", (134, 85, 40), (52, 128, 201))):
            file = tmp_path / f"{scheme}.png"
            options = (f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1280,900")
            chromium(tmp_path, url, f"--screenshot={file}", *options)
            pixels = np.asarray(Image.open(file).convert("RGB")).astype(int)
            areas = [int((np.abs(pixels - colour).max(axis=2) <= 2).sum()) for colour in (hot, cold)]
            # Half of 2 layers x 4 experts each, in rows of 31 pixels and cells of more than a hundred.
            assert min(areas) > 4 * 31 * 100
            assert abs(areas[0] - areas[1]) < 0.2 * max(areas)


def test_cells_are_reached_by_keys_and_mouse(tmp_path):
    keys = """
    const canvas = document.getElementById("heat");
    const key = (name) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key: name }));
    setTimeout(() => {
      for (const name of ["ArrowDown", "ArrowRight", "ArrowRight", "ArrowUp", "ArrowLeft", "ArrowDown"]) key(name);
      document.body.dataset.byKeys = document.getElementById("tip").textContent;
      document.body.dataset.aloud = document.getElementById("spoken").textContent;
      key("Escape");
      document.body.dataset.gone = document.getElementById("tip").hidden;
      const p = plan(canvas.clientWidth);
      point(cellAt(p.start_R[3] + 5, p.top + 5), 0, 0);
      document.body.dataset.byMouse = document.getElementById("tip").textContent;
      point(cellAt(p.rankLeft + 3.5 * p.rankWidth, p.top + 5), 0, 0);
      document.body.dataset.rank = document.getElementById("tip").textContent;
      point(cellAt(p.barLeft + 5, p.top + p.row + 5), 0, 0);
      document.body.dataset.layer = document.getElementById("tip").textContent;
    }, 1500);
    """
    snapshot = snapshot_of(FakeCore())
    with page_with(keys, lambda: snapshot) as url:
        page = Page(chromium(tmp_path, url, "--dump-dom"))
    (body,) = [attributes for tag, attributes in page.tags if tag == "body"]
    # FakeCore counts 0, 1, ... 15 by layer, source and expert; its second layer is in reverse order.
    of = "% of the layer\n"
    tokens = f"24 tokens, 26.1 {of}1.04{TIMES} an even share"
    assert body["data-by-keys"] == f"Layer 1, expert 2\nrank 1, engine 0\n{tokens}"
    assert body["data-aloud"] == body["data-by-keys"].replace("\n", ", ")
    assert body["data-gone"] == "true"
    tokens = f"10 tokens, 35.7 {of}1.43{TIMES}"
    assert body["data-by-mouse"] == f"Layer 0, expert 3\nrank 3, engine 1\n{tokens} an even share"
    assert body["data-rank"] == f"Layer 0, rank 3, engine 1\n{tokens} the mean rank"
    assert body["data-layer"].startswith(f"Layer 1\nfullest rank 1.13{TIMES} the mean\n")


def test_lost_connection_is_shown_until_it_returns(tmp_path):
    snapshot = snapshot_of(FakeCore())
    answers: list[None] = []

    def answer():
        answers.append(None)
        return snapshot if len(answers) == 1 else None

    with page_with("", answer) as url:
        page = Page(chromium(tmp_path, url, "--dump-dom", budget_ms=4500))
    assert len(answers) >= 3
    assert page.text["state"] == "✕ connection lost"
    assert "No answer from the server (503" in page.text["notices"]
    assert page.count("main", "stale") == 1
    assert page.count("article", "engine") == 2  # the last data stay

    answers.clear()
    with page_with("", lambda: snapshot if len(answers) > 1 else answers.append(None)) as url:
        page = Page(chromium(tmp_path, url, "--dump-dom", budget_ms=4500))
    assert page.text["state"] == "● serving"
    assert page.count("main", "stale") == 0


@pytest.mark.parametrize(("state", "hangs"), [("serving", True), ("warming", False)])
def test_hanging_engine_thread_is_shown_except_while_warming(tmp_path, state, hangs):
    snapshot = snapshot_of(FakeCore(state=state))
    with page_with("", lambda: snapshot) as url:
        page = Page(chromium(tmp_path, url, "--dump-dom", budget_ms=9500))
    assert ("The engine thread has not answered for" in page.text["notices"]) == hangs


def test_page_does_not_grow(tmp_path):
    """The number of elements is constant over many different snapshots."""
    rounds: list[None] = []

    def answer():
        rounds.append(None)
        records = [replace(RECORD, request_id=f"r{len(rounds)}-{number}", arrival=97.0) for number in range(20)]
        return {**snapshot_of(FakeCore(), *records), "time": float(len(rounds))}

    count = """
    const sizes = [];
    const count = () => sizes.push(document.getElementsByTagName("*").length);
    setInterval(() => { count(); document.body.dataset.sizes = sizes; }, 10000);
    """
    with page_with(count, answer) as url:
        page = Page(chromium(tmp_path, url, "--dump-dom", budget_ms=60_000))
    (body,) = [attributes for tag, attributes in page.tags if tag == "body"]
    sizes = [int(size) for size in body["data-sizes"].split(",")]
    assert len(rounds) > 30 and len(sizes) > 3
    assert len(set(sizes)) == 1
