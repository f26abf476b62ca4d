import io
import json
import math
from dataclasses import fields

import numpy as np
from rich.console import Console

from gimbal_jax.bench.load import LoadConfig
from gimbal_jax.bench.measurement import Measurement, Summary, summarise
from gimbal_jax.bench.report import bench_record, last_profiles, latency_table, profile_table, rate_table
from gimbal_jax.bench.rounds import Round, Surface
from gimbal_jax.serving.engine.meters import PhaseTimes
from tests.bench.test_rounds import FakeSurface

SURFACE = Surface("grpc", "host:1", "small", "token ids", np.arange(9), FakeSurface().send)
PHASES = (PhaseTimes("wait", 0.009, 0.008, 0.02), PhaseTimes("commit", 0.001, 0.001, 0.0025))


def bench_round(kind, number, ttft_s, rate=None, **options) -> Round:
    good = Measurement(0.0, 100, 3, ttft_s, ttft_s + 0.02, "", (0.005, 0.015), cached_tokens=25)
    summary = summarise([good, Measurement(0.0, 100, 0, math.nan, 0.001, "full")])
    return Round(kind, number, rate, summary, 0.25, 1.5, **({"phases": (), "errors": ("full",)} | options))


ROUNDS = [
    bench_round("warmup", 0, 9.0, phases=PHASES),
    bench_round("offline", 0, 0.18),
    bench_round("offline", 1, 0.08, phases=PHASES[:1]),
    bench_round("offline", 2, 0.03, phases=PHASES),
    bench_round("online", 0, 0.012, rate=1.25),
]


def text_of(table) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=80).print(table)
    return out.getvalue().splitlines()


def cells(table) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in text_of(table) if line.startswith("│")]


def test_rates_of_each_round_and_their_median():
    assert cells(rate_table(ROUNDS)) == [
        ["warmup 1", "0.11", "0.3", "11.4", "25.0%", "1", "0.25", "1.50"],
        ["offline 1", "5.00", "15.0", "515.0", "25.0%", "1", "0.25", "1.50"],
        ["offline 2", "10.00", "30.0", "1,030.0", "25.0%", "1", "0.25", "1.50"],
        ["offline 3", "20.00", "60.0", "2,060.0", "25.0%", "1", "0.25", "1.50"],
        ["median", "10.00", "30.0", "1,030.0", "25.0%", "1", "", ""],
        ["online 1", "31.25", "93.8", "3,218.8", "25.0%", "1", "0.25", "1.50"],
        ["median", "31.25", "93.8", "3,218.8", "25.0%", "1", "", ""],
    ]


def test_latencies_of_each_round_and_their_median():
    rows = cells(latency_table(ROUNDS))
    assert rows[1] == ["offline 1", "180/180/180", "10.0/10.0/10.0", "10.0/10.0/14.9", "200/200/200"]
    assert rows[4] == ["median", "80.0/80.0/80.0", "10.0/10.0/10.0", "10.0/10.0/14.9", "100/100/100"]
    failed = Round("offline", 0, None, summarise([Measurement(0.0, 1, 0, math.nan, 0.5, "x")]), 0.0, None, (), ("x",))
    assert cells(latency_table([failed])) == [[name, *["-/-/-"] * 4] for name in ("offline 1", "median")]
    assert cells(rate_table([failed]))[0] == ["offline 1", "0.00", "0.0", "0.0", "-", "1", "0.00", "-"]


def test_rows_are_lines_of_80_columns():
    rounds = [*ROUNDS, bench_round("online", 1, 9.8), bench_round("online", 2, 0.0998)]
    for table in (rate_table(rounds), latency_table(rounds)):
        assert len(text_of(table)) == 4 + 1 + 4 + 4 + 2 + 1, "head, rows, lines between groups"
        assert "…" not in "".join(text_of(table))


def test_the_profile_is_of_the_last_round_and_its_shares_add_up():
    assert last_profiles(ROUNDS) == {"offline": PHASES}
    assert cells(profile_table("offline", PHASES)) == [
        ["wait", "9.000", "8.000", "20.000", "90.0%"],
        ["commit", "1.000", "1.000", "2.500", "10.0%"],
        ["all", "10.000", "", "", ""],
    ]


def test_the_record_is_json_with_every_number():
    load = LoadConfig(requests=2, shared_prefix=0.5)
    record = json.loads(json.dumps(bench_record(SURFACE, load, ROUNDS, 2**30, "1.2"), allow_nan=False))
    assert set(record) == {
        *("version", "surface", "address", "model", "prompts", "load", "rounds", "median", "peak_rss_bytes")
    }
    assert (record["load"]["shared_prefix"], record["load"]["trace"], record["peak_rss_bytes"]) == (0.5, None, 2**30)
    names = {field.name for field in fields(Summary)}
    assert [set(one["summary"]) for one in record["rounds"]] == [names] * 5
    assert [(one["kind"], one["rate"], one["errors"]) for one in record["rounds"][3:]] == [
        ("offline", None, ["full"]),
        ("online", 1.25, ["full"]),
    ]
    assert record["rounds"][3]["phases"][1] == {"name": "commit", "mean_s": 0.001, "p50_s": 0.001, "p99_s": 0.0025}
    assert set(record["median"]) == {"offline", "online"} and set(record["median"]["offline"]) == names
    assert record["median"]["offline"]["requests_per_s"] == 10.0
    nothing = bench_record(SURFACE, load, [Round("offline", 0, None, summarise([]), 0.0, None, (), ())], None, "1")
    assert nothing["median"]["offline"]["ttft_p99_s"] is nothing["rounds"][0]["summary"]["seconds"] is None
