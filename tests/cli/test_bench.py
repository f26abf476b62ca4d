"""``gimbal bench`` against a server without a model; with one: tests/e2e/test_bench.py."""

import asyncio
import json
import re

import pytest
from typer.testing import CliRunner

from gimbal_jax.cli.main import app
from tests.bench.test_load import word_tokenizer
from tests.serving.fake_server import FakeCore, running_server

SHORT = ("--requests", "6", "--input-len", "5", "--output-len", "3", "--rounds", "2")


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)], env={"COLUMNS": "100", "TERM": "dumb"})


def bench_a_fake(*arguments, **core_options):
    """The result against a gRPC server of a fake core, and the core."""

    async def main():
        with FakeCore(**core_options) as core:
            async with asyncio.timeout(120), running_server(core) as (_, port, *_):
                return await asyncio.to_thread(bench, "--target", f"127.0.0.1:{port}", *arguments), core

    return asyncio.run(main())


def test_measures_a_server_and_writes_what_it_saw(tmp_path):
    result, core = bench_a_fake(*SHORT, "--load", "online", "--rate", "200", "--json", tmp_path / "bench.json")
    assert result.exit_code == 0, result.output
    assert all(text in result.stdout for text in ("online 2", "median", "TTFT", "model fake", "200.000 requests/s"))
    record = json.loads((tmp_path / "bench.json").read_text())
    assert [one["kind"] for one in record["rounds"]] == ["warmup", "online", "online"]
    assert [one["summary"]["output_tokens"] for one in record["rounds"]] == [18, 18, 18]
    assert len(core.submitted) == 18 and {len(request.prompt) for request in core.submitted} == {5}


def test_profile_is_shown_as_the_server_tells_it():
    result, core = bench_a_fake(*SHORT, "--profile")
    assert result.exit_code == 0, result.output
    for phase in core.status().steps.phases:
        assert re.search(rf"{phase.name}\W+{phase.mean_s * 1e3:.3f}", result.stdout), result.stdout


def test_failed_requests_make_the_exit_code_1():
    result, _ = bench_a_fake(*SHORT, state="draining")
    assert result.exit_code == 1, result.output
    assert "failed: the server is draining" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((), "give one of MODEL, --target and --url"),
        (("model", "--target", "h:1"), "give one of MODEL, --target and --url"),
        (("--target", "h:1", "--serve-option", "--dp 2"), "are for a MODEL that is served here"),
        (("--target", "h:1", "--surface", "http"), "are for a MODEL that is served here"),
        (("--url", "http://h:1"), "--tokenizer goes with --url"),
        (("--target", "h:1", "--tokenizer", "t"), "--tokenizer goes with --url"),
        (("--url", "http://h:1", "--tokenizer", "t", "--profile"), "--profile needs gRPC"),
        (("--target", "h:1", "--rate", "1"), "--rate and --share are for --load online"),
        (("--target", "h:1", "--load", "online", "--share", "0"), "--share must be above 0 and finite, not 0"),
        (("--target", "h:1", "--requests", "0"), "requests must be at least 1, not 0"),
        (("--target", "h:1", "--trace", "nowhere.csv"), "nowhere.csv"),
        (("--target", "h:1", "--json", "/nowhere/bench.json"), "/nowhere/bench.json"),
        (("--url", "http://h:1", "--tokenizer", "nowhere.json"), "nowhere.json"),
        (("--target", "127.0.0.1:1"), "127.0.0.1:1: "),
    ],
)
def test_errors_name_what_is_wrong(arguments, error):
    result = bench(*arguments)
    assert result.exit_code == 2 and f"{error}" in result.stderr, result.stderr
    assert result.stderr.startswith("error: ") and "Traceback" not in result.stderr


def test_an_http_server_that_is_not_there(tmp_path):
    (tmp_path / "tokenizer.json").write_text(word_tokenizer(150))
    result = bench("--url", "http://127.0.0.1:1", "--tokenizer", tmp_path / "tokenizer.json")
    assert result.exit_code == 2 and "error: http://127.0.0.1:1: connection: " in result.stderr
    assert "warming up does not answer HTTP yet: wait until it prints `serving`" in result.stderr
