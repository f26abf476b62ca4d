"""``gimbal simulate``: a run, its table, its line of JSON, and errors that name their option."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner, Result

from gimbal_jax.cli.main import app
from gimbal_jax.config import MeshConfig
from gimbal_jax.simulation.routing import BALANCED, RoutingConfig
from gimbal_jax.simulation.scenario import Scenario, run_scenario
from gimbal_jax.simulation.systems import SYSTEMS
from gimbal_jax.simulation.workload import WorkloadConfig

SMALL = ("--requests", 30, "--lengths", "azure-code", "--routing", "balanced", "--rate", 20)


def simulate(*arguments: object) -> Result:
    words = ["simulate", *map(str, arguments)]
    result = CliRunner().invoke(app, words, env={"COLUMNS": "100", "TERM": "dumb"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_run_is_told_and_appended(tmp_path):
    path = tmp_path / "runs.jsonl"
    for seed in 0, 1:
        result = simulate(*SMALL, "--seed", seed, "--json", path)
        assert result.exit_code == 0, result.output
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    workload = WorkloadConfig("azure-code", requests=30, rate=20.0)
    assert lines == [
        json.loads(json.dumps(run_scenario(Scenario(workload=workload, routing=BALANCED, seed=seed))))
        for seed in (0, 1)
    ]
    shown = " ".join(result.stdout.split())  # wherever lines are broken
    assert f"{lines[1]['clients']['ttft_mean_s'] * 1e3:,.1f}" in shown
    assert f"{lines[1]['remote_share']:.1%}" in shown
    for words in (
        "simulated, not measured",
        "Qwen3-30B-A3B on 4 H100s: DP 2 x TP 2, 1 node(s), sparse exchange, graph costs",
        "30 requests, lengths azure-code, poisson at 20/s; seed 1",
        "dispatch: policy=gimbal",
        "first decision after 750 steps",
        "30 / 0",
    ):
        assert words in shown
    assert "30/30" in result.stderr and "requests simulated per second" in result.stderr


def test_options_reach_the_scenario(tmp_path):
    path = tmp_path / "run.jsonl"
    traffic = ("--topics", 2, "--persistence", 0.5, "--trend", 0.25, "--trend-s", 5)
    server = ("--token-budget", 1024, "--max-rows", 32, "--kv-tokens", 90_000, "--dp", 2, "--tp", 4)
    more = ("--exchange", "gather", "--system", "late_static", "--costs", "eager", "--seed", 3)
    several = ("--model", "Qwen3-235B-A22B", "--nodes", 2)
    arrivals = ("--requests", 9, "--lengths", "two-end", "--arrivals", "bursty", "--burstiness", 3, "--rate", 5)
    result = simulate(*traffic, *server, *more, *several, *arrivals, "--json", path)
    assert result.exit_code == 0, result.output
    expected = Scenario(
        system="late_static",
        costs="eager",
        workload=WorkloadConfig("two-end", 9, 5.0, "bursty", 3.0),
        routing=RoutingConfig(topics=2, persistence=0.5, trend=0.25, trend_s=5.0),
        model="Qwen3-235B-A22B",
        mesh=MeshConfig(2, 4, nodes=2),
        exchange="gather",
        token_budget=1024,
        max_rows=32,
        kv_tokens=90_000,
        seed=3,
    )
    record = run_scenario(expected)
    assert json.loads(path.read_text()) == json.loads(json.dumps(record))
    assert f"{record['far_share']:.1%} / {record['far_bytes_per_token']:,.0f}" in result.stdout


def test_a_share_of_capacity_is_turned_into_a_rate(tmp_path):
    path = tmp_path / "run.jsonl"
    small = (
        "--requests",
        30,
        "--lengths",
        "azure-code",
        "--routing",
        "balanced",
        "--max-rows",
        4,
        "--system",
        "static",
    )
    result = simulate(*small, "--token-budget", 512, "--share-of-capacity", 0.5, "--json", path)
    assert result.exit_code == 0, result.output
    record = json.loads(path.read_text())
    assert record["scenario"]["share_of_capacity"] == 0.5
    assert f"poisson at {record['rate']:.4g}/s, 50% of the capacity of vllm" in result.stdout


def test_systems_are_listed():
    result = simulate("--list-systems")
    assert result.exit_code == 0
    assert all(name in result.stdout for name in SYSTEMS)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--system", "tgi"), "--system tgi: must be one of vllm, "),
        (("--share-of-capacity", 0.5), "--rate and --share-of-capacity both set the rate"),
        (("--rate", 0), "rate must be above 0 and finite, not 0.0"),
        (("--topics", 2), "--topics is for --routing synthetic, not balanced"),
        (("--routing", "nowhere.npz"), "nowhere.npz"),
        (("--routing", "synthetic", "--persistence", 2), "persistence must be from 0 to 1, not 2.0"),
        (("--token-budget", 100), "token_budget must be at least max_rows and tile (256), not 100"),
        (("--dp", 3, "--tp", 1), "128 experts cannot be split over 3 ranks"),
        (("--nodes", 3), "nodes 3: must split 2 engines of 2 GPUs evenly"),
        (("--model", "Qwen3-1B"), "model must be one of Qwen3-30B-A3B, Qwen3-235B-A22B"),
        (("--model", "Qwen3-Coder-480B-A35B"), "num_experts 160: H100 kernels were measured for 128 only"),
        (("--kv-tokens", 640), "must be at most 640"),
    ],
)
def test_errors_name_what_is_wrong(options, message):
    result = simulate(*SMALL, *options)
    assert result.exit_code == 2
    assert "error:" in result.stderr and message in result.stderr
    assert "Traceback" not in result.output


def test_choices_are_named():
    result = simulate("--lengths", "gpt")
    assert result.exit_code == 2
    assert "azure-conv" in result.stderr


def test_simulating_loads_neither_jax_nor_grpc():
    program = "import sys, gimbal_jax.cli.simulate\nsys.exit(any(name in sys.modules for name in ('jax', 'grpc')))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
