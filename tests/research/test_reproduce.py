"""research/reproduce.py: it computes missing results, keeps finished ones, and continues after an interrupt."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gimbal_jax.simulation.scenario import Scenario
from gimbal_jax.simulation.workload import WorkloadConfig
from research import results_tables
from research.experiments import Scope, quick
from research.reproduce import compute, compute_all, main
from research.store import ResultStore
from research.tables import all_tables
from research.tasks import CalibrationPoint, capacity_task
from tests.research.results_made_up import made_up_store

ROOT = Path(__file__).parents[2]
SMALL = Scenario("static", workload=WorkloadConfig("azure-code", requests=5, rate=20.0), max_rows=4)


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_missing_results_are_computed_once_and_errors_are_returned(tmp_path):
    store = ResultStore(tmp_path / "results.jsonl")
    by_share = replace(SMALL, share_of_capacity=0.5)
    bad = replace(SMALL, mesh=replace(SMALL.mesh, nodes=3))
    (error,) = compute_all([SMALL, by_share, bad], store, jobs=2)
    assert "nodes" in error and bad not in store
    capacity = capacity_task(by_share)
    assert capacity is not None and len(store) == 3
    assert store[by_share]["rate"] == pytest.approx(store[capacity]["requests_per_s"] / 2)
    assert store[SMALL]["wall_s"] > 0

    before = store.path.read_bytes()
    assert compute_all([SMALL, by_share], store, jobs=1) == []
    assert store.path.read_bytes() == before


def test_a_calibration_point_is_computed():
    found = compute(CalibrationPoint(0.2, 0.1, windows=2, time_limit_s=1.0, gap=0.05))
    assert found["exact"]["same"] == 1.0 >= found["gimbal"]["same"] > 0.3


@pytest.mark.slow
def test_an_interrupted_command_keeps_its_results_and_continues(tmp_path):
    # 8 results take no time, and 3 take seconds each. One of these 3 is still missing when the command is interrupted.
    command = [sys.executable, "-m", "research.reproduce", "2", "4", "--requests", "100", "--jobs", "1"]
    command += ["--out", str(tmp_path)]
    results = tmp_path / "results.jsonl"
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # background jobs of a shell ignore it
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, preexec_fn=heed)
    deadline = time.monotonic() + 300
    while not (results.exists() and results.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    kept = lines(results)
    assert process.returncode != 0 and 1 <= len(kept) < 11

    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    found = lines(results)
    assert found[: len(kept)] == kept and len(found) == 11
    assert (tmp_path / "figure_2.png").exists() and (tmp_path / "figure_4.png").exists()


def application() -> typer.Typer:
    app = typer.Typer()
    app.command()(main)
    return app


def test_the_list_shows_how_much_is_done(tmp_path):
    made_up_store(tmp_path / "quick", ("2", "late"), quick(Scope()))
    result = CliRunner().invoke(application(), ["--list", "--quick", "--out", str(tmp_path)], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    rows = {line.split("│")[1].strip(): line.split("│") for line in result.output.splitlines() if "│" in line}
    assert rows["2"][4].strip() == rows["late"][4].strip() == "all"
    assert rows["6"][4].strip() == "0" and "cost of counting" in rows["13"][2]


def test_an_unknown_figure_is_rejected(tmp_path):
    result = CliRunner().invoke(application(), ["3", "--out", str(tmp_path)])
    assert result.exit_code == 2 and "figure 3: must be one of 2, 4, 6," in result.output


def test_tables_are_written_between_the_comments_of_the_document(tmp_path, monkeypatch):
    store = made_up_store(tmp_path / "quick", scope=quick(Scope()))
    document = tmp_path / "results.md"
    names = [table.name for table in all_tables(store, quick(Scope()))]
    document.write_text(
        "".join(f"## {name}\n<!-- begin {name} -->\nold\n<!-- end {name} -->\ntext\n" for name in names)
    )
    monkeypatch.setattr(results_tables, "DOCUMENT", document)
    results_tables.main(out=tmp_path, small=True, write=True)
    text = document.read_text()
    assert "old" not in text and text.count("text\n") == len(names)
    assert "| e2e: gimbal against vllm | 7.3 | -32.0% | -20.0%" in text
