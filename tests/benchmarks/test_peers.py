"""The peers' bench, with a server and a load generator that only pretend."""

import json
import os
import shlex
import subprocess
import sys
import textwrap
import time
from dataclasses import asdict
from math import inf
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import typer
from typer.testing import CliRunner

from benchmarks import peer_server
from benchmarks import peers as bench_peers
from benchmarks.peer_server import Load, generator_command, result_of, serving
from benchmarks.peers import (
    Bench,
    Lengths,
    Server,
    figures,
    load_of,
    measure,
    server_of,
    spread,
    static_speed,
    table_of,
)
from gimbal_jax.serving.text.tokenizer import load_tokenizer

CHILD_FILE = "child.pid"
SERVER = f"""
import http.server, json, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
open({CHILD_FILE!r}, "w").write(str(child.pid))
ready = time.monotonic() + 0.5

class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        good = self.path == "/v1/completions" and body["model"] == "m" and time.monotonic() > ready
        self.send_response(200 if good else 503)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""
# Takes 2 s; request i has its first token after i + 1 s, and then one each half second.
GENERATOR = """#!{python}
import json, pathlib, sys
options = dict(zip(sys.argv[3::2], sys.argv[4::2]))
count = int(options["--num-prompts"])
record = dict(
    duration=2.0, errors=[""] * count, ttfts=[i + 1.0 for i in range(count)], itls=[[0.5] * 3] * count
)
pathlib.Path(options["--result-dir"], options["--result-filename"]).write_text(json.dumps(record))
with open({log!r}, "a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
"""


@pytest.fixture
def bench(tmp_path: Path, monkeypatch) -> Bench:
    monkeypatch.chdir(tmp_path)
    generator = tmp_path / "vllm"
    generator.write_text(GENERATOR.format(python=sys.executable, log=str(tmp_path / "loads")))
    generator.chmod(0o755)
    Path("server.py").write_text(SERVER)
    return Bench(tmp_path, str(generator), tmp_path, input_len=8, output_len=4, offline=2, online=3)


def pretender(name: str = "peer") -> Server:
    return Server(name, "m", (sys.executable, "server.py", "{port}"))


def test_a_peer_is_a_name_perhaps_a_model_and_a_command():
    assert asdict(server_of("a=env X=1 run --port {port}")) == {
        "name": "a",
        "model": "m",
        "command": ("env", "X=1", "run", "--port", "{port}"),
    }
    assert server_of("a:/some/model=run 'two words'").model == "/some/model"
    for wrong in ("run", "=run", "a=", "gimbal=run"):
        with pytest.raises(typer.BadParameter):
            server_of(wrong)


def is_alive(pid: int) -> bool:
    """Neither gone nor waiting to be reaped."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_server_is_waited_for_and_ends_with_its_children(bench):
    began = time.monotonic()
    with serving(pretender().command, "m", Path("log")) as (_, pid):
        assert time.monotonic() - began > 0.5  # it refused at first
        child = int(Path(CHILD_FILE).read_text())
        assert os.getpgid(child) == pid
    for gone in (pid, child):
        deadline = time.monotonic() + 60  # a process that was killed may still be on its last turn
        while is_alive(gone):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_server_that_ends_says_why(bench):
    with (
        pytest.raises(SystemExit, match=r"(?s)exit code 3.*no such thing"),
        serving([sys.executable, "-c", "print('no such thing'); raise SystemExit(3)"], "m", Path("log")),
    ):
        pass


def test_figures_are_those_of_the_requests():
    load = Load((), inf, (3, 5, 1), seed=0)
    records = {"errors": [""] * 3, "duration": 3.0, "ttfts": [0.1, 0.2, 0.3], "itls": [[0.1, 0.3], [0.4], []]}
    result = result_of(records, load, foreign_cpu=0.25)
    assert result.tokens_per_s == pytest.approx(9 / 3)
    assert result.requests_per_s == pytest.approx(1.0)
    assert result.ttft_mean == pytest.approx(200)
    assert result.ttft_p99 == pytest.approx(1e3 * np.percentile([0.1, 0.2, 0.3], 99))
    # 0.4 s for 2 tokens after the first, and for 4 though they came in one piece; the last has one token only.
    assert result.tpot_mean == pytest.approx((200 + 100) / 2)
    assert result.e2e_mean == pytest.approx(1e3 * np.mean([0.5, 0.6, 0.3]))
    with pytest.raises(SystemExit, match="1 requests failed: refused"):
        result_of(records | {"errors": ["", "refused", ""]}, load, 0.0)


def test_the_generator_sends_what_the_load_says(bench):
    load = load_of(bench, "shared", 5, 2.5, seed=7)
    command = generator_command("vllm", Path("model"), 123, "m", load, Path("a/b.json"))
    assert command[:3] == ["vllm", "bench", "serve"]
    text = " ".join(command)
    for words in (
        "--base-url http://127.0.0.1:123 ",
        "--num-prompts 5 --request-rate 2.5 --seed 7 ",
        "--random-prefix-len 6 --random-input-len 2 --random-output-len 4 ",
        "--result-dir a --result-filename b.json ",
    ):
        assert words in text
    assert "--request-rate inf" in " ".join(
        generator_command("vllm", Path("model"), 123, "m", load_of(bench, "fixed", 5, inf, 7), Path("a/b.json"))
    )


def test_a_turn_warms_up_and_gives_every_load_prompts_of_its_own(bench):
    loads: list[tuple[Lengths, str]] = [("fixed", "offline"), ("fixed", "online"), ("shared", "offline")]
    results = measure(bench, pretender(), 3, loads, {"fixed": 1.5})
    assert list(results) == ["fixed-offline", "fixed-online", "shared-offline"]
    assert results["fixed-offline"]["tokens_per_s"] == pytest.approx(2 * 4 / 2)
    assert results["fixed-online"]["tokens_per_s"] == pytest.approx(3 * 4 / 2)
    assert results["fixed-offline"]["ttft_mean"] == pytest.approx(1500)
    assert results["fixed-offline"]["tpot_mean"] == pytest.approx(500)
    said = [json.loads(line) for line in Path("loads").read_text().splitlines()]
    options = [dict(zip(words[2::2], words[3::2], strict=False)) for words in said]
    assert [one["--request-rate"] for one in options] == ["inf", "inf", "1.5", "inf"]
    assert len({one["--seed"] for one in options}) == 4


def test_mixed_prompts_have_the_tokens_that_were_drawn(tmp_path: Path):
    trained = tokenizers.Tokenizer(tokenizers.models.BPE())
    trained.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    trained.train_from_iterator(["some words that come twice, and some words that come twice"], trainer)
    trained.save(str(tmp_path / "tokenizer.json"))
    bench = Bench(tmp_path, "", tmp_path, input_len=20, output_len=10, offline=2, online=3)
    load = load_of(bench, "mixed", 200, inf, seed=5)
    lines = [json.loads(line) for line in (tmp_path / "mixed-5.jsonl").read_text().splitlines()]
    assert tuple(line["output_tokens"] for line in lines) == load.output_tokens
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    lengths = [len(tokenizer.encode(line["prompt"])) for line in lines]
    assert max(lengths) <= 60
    assert min(lengths) >= 1
    assert len(set(lengths)) > 10
    assert 10 < np.mean(lengths) < 30
    assert 5 < np.mean(load.output_tokens) < 15
    assert load_of(bench, "mixed", 200, inf, seed=5) == load
    assert load_of(bench, "mixed", 200, inf, seed=6).output_tokens != load.output_tokens


def test_ratios_are_of_the_same_round():
    rounds = [
        {"gimbal": {"tokens_per_s": 20.0}, "a": {"tokens_per_s": 10.0}},
        {"gimbal": {"tokens_per_s": 30.0}, "a": {"tokens_per_s": 10.0}, "b": {"tokens_per_s": 60.0}},
    ]
    assert figures(rounds, "tokens_per_s", "gimbal", "a") == [2.0, 3.0]
    assert figures(rounds, "tokens_per_s", "gimbal", "b") == [0.5]
    assert figures(rounds, "ttft_mean", "gimbal", "a") == []
    assert spread([3.0, 1.0, 200.0]) == "1 3 200"
    cells = [list(column.cells) for column in table_of("fixed-offline", rounds).columns[:2]]
    assert list(zip(*cells, strict=True)) == [
        ("gimbal", "20 25 30"),
        ("a", "10 10 10"),
        ("b", "60 60 60"),
        ("gimbal / a", "2 2.5 3"),
        ("gimbal / b", "0.5 0.5 0.5"),
    ]


def test_a_program_says_its_speed():
    assert static_speed([sys.executable, "-c", "print('static: 516.5 tok/s [..]')"]) == 516.5
    for program in ("print('nothing')", "print('1 tok/s'); raise SystemExit(1)"):
        with pytest.raises(SystemExit, match="failed"):
            static_speed([sys.executable, "-c", program])


def test_rounds_rotate_and_are_written(bench, monkeypatch):
    """The whole command, with pretenders for all servers."""
    turns = []
    real = bench_peers.measure

    def measured(bench, server, *rest):
        turns.append(server.name)
        return real(bench, pretender(server.name), *rest)

    monkeypatch.setattr(bench_peers, "measure", measured)
    app = typer.Typer()
    app.command()(bench_peers.main)
    program = Path("static.py")
    program.write_text("print('10 tok/s')")
    command = textwrap.dedent(f"""
        . --loadgen {bench.loadgen} --peer a=x --static s={sys.executable}\\ static.py --lengths fixed
        --rounds 2 --requests 2 --online-requests 2 --share 0.5 --out out.json --output-len 4
    """)
    done = CliRunner().invoke(app, shlex.split(command), catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert turns == ["gimbal", "a", "a", "gimbal", "gimbal", "a"]  # rates first; in round 2 the program comes first
    record = json.loads(Path("out.json").read_text())
    assert record["rates"] == {"fixed": 0.5}  # half of 2 requests in 2 s
    assert [sorted(one) for one in record["rounds"]["fixed-offline"]] == [["a", "gimbal", "s"]] * 2
    assert [sorted(one) for one in record["rounds"]["fixed-online"]] == [["a", "gimbal"]] * 2
    assert record["rounds"]["fixed-offline"][1]["s"] == {"tokens_per_s": 10.0}


@pytest.mark.parametrize(("name", "number"), [("a", 1), ("gimbal", 1), ("a", 0)])
def test_a_peer_that_fails_loses_the_rest_of_its_turn(bench, monkeypatch, name, number):
    real = peer_server.put_load

    def put_load(loadgen, model, port, served, load, pid):
        if load.rate < inf:
            raise SystemExit("1 requests failed")
        return real(loadgen, model, port, served, load, pid)

    monkeypatch.setattr(bench_peers, "put_load", put_load)
    loads: list[tuple[Lengths, str]] = [("fixed", "offline"), ("fixed", "online")]
    if (name, number) == ("a", 1):
        assert list(bench_peers.measure(bench, pretender(name), number, loads, {"fixed": 1.0})) == ["fixed-offline"]
    else:
        with pytest.raises(SystemExit, match="1 requests failed"):
            bench_peers.measure(bench, pretender(name), number, loads, {"fixed": 1.0})


BURNS = "import time\nwhile time.process_time() < 0.5: pass\nprint(flush=True)\ninput()"


def test_foreign_cpu_is_what_neither_server_nor_generator_used():
    with subprocess.Popen(
        [sys.executable, "-c", BURNS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as server:
        before_all, before_own = peer_server._machine_cpu_s(), peer_server._own_cpu_s(-1)
        assert server.stdout is not None and server.stdout.readline()
        own = peer_server._own_cpu_s(server.pid) - before_own
        assert own >= 0.4
        assert peer_server._machine_cpu_s() - before_all >= 0.4
        server.communicate(b"\n")
