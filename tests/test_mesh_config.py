"""``scripts/mesh_config.py``: its rule chooses, and the server's parser takes the file that it writes."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.serve.toml_file import read_config
from gimbal_jax.planning.hardware import parse_gpus
from scripts.mesh_config import candidates_of, choose, main

MODEL = "Qwen3-30B-A3B"


def run(*arguments: object):
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, [str(argument) for argument in arguments], env={"TERM": "dumb"})


def test_the_server_accepts_the_written_file(tmp_path: Path):
    path = tmp_path / "new" / "serve.toml"
    result = run(MODEL, "--gpus", "2xH100", "--gpus", "4xH100", "--rate", 65, "--out", path)
    assert result.exit_code == 0, result.output
    options = ServeOptions(**read_config(path))
    assert (options.model, options.dp, options.tp) == ("Qwen/Qwen3-30B-A3B", 2, 2)
    assert (options.max_rows, options.token_budget, options.exchange) == (128, 8192, "gather")
    assert f"gimbal serve --config {path}" in result.output


def test_the_rule_takes_the_fewest_gpus_that_reach_the_rate():
    candidates = candidates_of(MODEL, ["8xH100", "4xH100"], None)
    for rate, count in ((1, 4), (100, 8)):
        chosen = choose(candidates, rate)
        assert chosen.request.count == count == parse_gpus(chosen.gpus)[1]
        assert chosen.plan.requests_per_second >= rate
        rivals = [c for c in candidates if c.request.count == count and c.plan.requests_per_second >= rate]
        assert chosen.plan.concurrent == max(c.plan.concurrent for c in rivals)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--gpus", "4xH100", "--rate", 1000), "--rate 1000: no mesh of these offers reaches it. The best has 6"),
        (("--gpus", "1xL40S"), "--gpus 1xL40S: no mesh of these offers serves Qwen3-30B-A3B"),
        (("--gpus", "2x8xH100"), "--link: 2 nodes need a network between them"),
    ],
)
def test_errors_name_their_option(tmp_path: Path, arguments, message):
    result = run(MODEL, *arguments, "--out", tmp_path / "serve.toml")
    assert result.exit_code == 2 and message in result.output
    assert not (tmp_path / "serve.toml").exists()
