"""``gimbal bench`` of a model, through gRPC and through the gateway: it starts its server, and stops it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gimbal_jax.model.demo_model import write_demo_model

# Two shapes of steps to compile, those of test_gateway.py.
SERVER = "--devices cpu:1 --max-rows 2 --token-budget 8 --tile 8 --num-pages 256"
LOAD = ("--requests", "6", "--input-len", "16", "--output-len", "5", "--rounds", "1", "--warmup", "0")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("bench") / "model"
    write_demo_model(folder)
    return folder


def bench(model: Path, compile_cache: Path, json_file: Path, *options: str) -> dict:
    command = [sys.executable, "-m", "gimbal_jax.cli", "bench", str(model), *LOAD, "--json", str(json_file), *options]
    command += ["--serve-option", f"{SERVER} --compile-cache {compile_cache}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(json_file.read_text())


def test_bench_over_grpc_reports_the_phases(model, compile_cache, tmp_path):
    record = bench(model, compile_cache, tmp_path / "bench.json", "--load", "online", "--profile")
    assert [one["kind"] for one in record["rounds"]] == ["offline", "online"]
    for one in record["rounds"]:
        summary = one["summary"]
        assert (summary["failed"], summary["input_tokens"], summary["output_tokens"]) == (0, 96, 30)
        assert 0 < summary["ttft_mean_s"] < summary["e2e_mean_s"] and summary["itl_mean_s"] > 0
        assert one["client_cpu_s"] > 0 and one["server_cpu_s"] > 0
    assert record["rounds"][1]["rate"] == pytest.approx(0.7 * record["median"]["offline"]["requests_per_s"])
    phases = {phase["name"]: phase["mean_s"] for phase in record["rounds"][1]["phases"]}
    assert set(phases) == {"schedule", "batch", "enqueue", "wait", "commit", "emit", "other"}
    assert all(seconds >= 0 for seconds in phases.values()) and sum(phases.values()) > 0
    assert record["peak_rss_bytes"] > 100 * 2**20


@pytest.mark.skipif(
    shutil.which("smg") is None and not Path(sys.executable).with_name("smg").exists(), reason="needs smg"
)
def test_bench_over_http_with_a_shared_prefix(model, compile_cache, tmp_path):
    record = bench(model, compile_cache, tmp_path / "bench.json", "--surface", "http", "--shared-prefix", "0.75")
    (one,) = record["rounds"]
    assert record["surface"] == "http" and record["model"] == "model"
    summary = one["summary"]
    assert (summary["failed"], summary["output_tokens"]) == (0, 30)
    assert summary["input_tokens"] == 96, "the words are one token each, in the gateway too"
    assert 0 < summary["ttft_mean_s"] < summary["e2e_mean_s"]
