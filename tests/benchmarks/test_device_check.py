"""``benchmarks.device.check`` without a GPU: its dry run, and the errors that it finds."""

import json
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import typer

from benchmarks.device import check as device_check
from benchmarks.device.parts import Part, Result, in_a_child, in_this_process, run_parts
from benchmarks.device.setting import TINY, Ops, Setting
from benchmarks.device.timing import looped
from gimbal_jax.pallas_kernels import grouped_ffn, paged_attention, route_and_count

SETTING = Setting(TINY, "xla", seed=7)
NUMERICS = ("route_numerics", "ffn_numerics", "attention_numerics")


def run(parts: Any, setting: Setting = SETTING, **given: Any) -> dict[str, dict[str, Any]]:
    """Records by name; in this process, with time to spare, unless said otherwise."""
    how: dict[str, Any] = {
        "budget_s": 1e6,
        "execute": in_this_process,
        "clock": time.monotonic,
        "say": lambda line: None,
    } | given
    return {record["name"]: record for record in run_parts(parts, setting, **how)}


def part(name: str, *results: Result, error: Exception | None = None) -> Part:
    def results_then_error(setting: Setting) -> Iterator[Result]:
        yield from results
        if error is not None:
            raise error

    return Part(name, results_then_error, limit_s=10)


def test_the_dry_run_of_every_part():
    records = run(device_check.PARTS)
    status = {name: record["status"] for name, record in records.items()}
    skipped = {"model_numerics": "skipped", "transformers": "skipped"}  # neither kernels nor torch here
    assert status == {part.name: skipped.get(part.name, "ok") for part in device_check.PARTS}
    results = {name: record["results"] for name, record in records.items()}
    json.dumps(results, allow_nan=False)
    check_rates(results)
    check_floor(results)


def check_rates(results: dict[str, Any]) -> None:
    """Speeds have units, spread and ceilings."""
    ffn = results["ffn_speed"]["N=5"]
    assert ffn["tflops"] == pytest.approx(5 * 2 * 6 * 64 * 64 / ffn["time"]["median_us"] / 1e6)
    assert ffn["tflops_share"] == pytest.approx(ffn["tflops"] / results["ceilings"]["matmul"]["tflops"])
    assert ffn["time"]["min_us"] <= ffn["time"]["median_us"] <= ffn["time"]["max_us"]
    assert ffn["time"]["n"] == TINY.samples
    route = results["route_speed"]["T=9"]
    assert route["faster_than_xla"] == pytest.approx(route["xla"]["median_us"] / route["fused"]["median_us"])
    assert route["faster_than_xla_met"] == (route["faster_than_xla"] >= 3)


def check_floor(results: dict[str, Any]) -> None:
    """The floor of a decode step is the time to read the weights that it touches."""
    step, model = results["model_speed"]["decode 2"], TINY.model
    hidden, heads = model.hidden_size, model.num_heads + model.num_kv_heads
    attention = 2 * hidden * heads * model.head_dim + 2 * model.head_dim
    rest = model.vocab_size * hidden + 3 * hidden + model.num_experts * hidden
    experts = step["experts_hit_per_layer"] * 3 * hidden * model.moe_intermediate_size
    assert step["weight_bytes_touched"] == 2 * (attention + rest + experts)
    assert 2 <= step["experts_hit_per_layer"] <= 4
    assert step["kv_bytes_read"] == 2 * TINY.context * 2 * 2 * model.num_kv_heads * model.head_dim
    triad = results["ceilings"]["triad"]["tb_per_s"]
    assert step["weight_floor_us"] == pytest.approx(step["weight_bytes_touched"] / triad / 1e6)


def wrong_weights(*arguments: Any, **how: Any) -> Any:
    routing = route_and_count(*arguments, **how)
    return routing._replace(weight_Tk=routing.weight_Tk * 1.0001)


def wrong_counts(logits: Any, valid: Any, slots: Any, **how: Any) -> Any:
    """Padding counts too."""
    counted = route_and_count(logits, jnp.ones(valid.shape, bool), slots, **how)
    return route_and_count(logits, valid, slots, **how)._replace(count_E=counted.count_E)


def wrong_order(logits: Any, valid: Any, slots: Any, **how: Any) -> Any:
    """Ties go to the higher expert."""
    flipped = route_and_count(logits[:, ::-1], valid, slots[::-1], **how)
    return flipped._replace(count_E=flipped.count_E[::-1])


def wrong_places(x: Any, place: Any, *rest: Any, **how: Any) -> Any:
    """The weights of the first pair are those of every pair."""
    weight, *others = rest
    return grouped_ffn(x, place, weight[:, :1] + 0 * weight, *others, **how)


def wrong_mask(q: Any, k: Any, v: Any, table: Any, start: Any, counts: Any, **how: Any) -> Any:
    """Every token sees the one after it."""
    return paged_attention(q, k, v, table, start + 1, counts, **how)


def wrong_padding(q: Any, k: Any, v: Any, table: Any, start: Any, counts: Any, **how: Any) -> Any:
    """Empty groups give what the first one gives."""
    out = paged_attention(q, k, v, table, start, counts, **how)
    return jnp.where((counts == 0)[:, None, None, None], out[:1], out)


@pytest.mark.parametrize(
    "ops,caught",
    [
        (Ops(route_and_count=wrong_weights), "route_numerics"),
        (Ops(route_and_count=wrong_counts), "route_numerics"),
        (Ops(route_and_count=wrong_order), "route_numerics"),
        (Ops(grouped_ffn=wrong_places), "ffn_numerics"),
        (Ops(paged_attention=wrong_mask), "attention_numerics"),
        (Ops(paged_attention=wrong_padding), "attention_numerics"),
    ],
    ids=lambda value: (
        "" if isinstance(value, str) else next(f.__name__ for f in vars(value).values() if "wrong" in str(f))
    ),
)
def test_a_wrong_kernel_is_caught_by_name(ops, caught):
    parts = [one for one in device_check.PARTS if one.name in NUMERICS]
    records = run(parts, replace(SETTING, ops=ops))
    assert {name: record["status"] for name, record in records.items()} == {
        name: "failed" if name == caught else "ok" for name in NUMERICS
    }
    wrong = [name for name, result in records[caught]["results"].items() if not result["ok"]]
    assert records[caught]["reason"] == ", ".join(wrong)


def test_an_exception_leaves_earlier_results_and_later_parts():
    records = run([part("first", ("a", {"x_us": 1.0}), error=ZeroDivisionError("no")), part("second", ("b", {}))])
    assert records["first"] | {"wall_s": 0} == {
        "name": "first",
        "status": "error",
        "reason": "ZeroDivisionError: no",
        "wall_s": 0,
        "results": {"a": {"x_us": 1.0}},
    }
    assert records["second"]["status"] == "ok"


def test_parts_that_no_longer_fit_are_skipped_by_name():
    ticks = count(step=30)  # seconds from one look at the clock to the next
    records = run([part(name) for name in "abc"], budget_s=100, clock=lambda: next(ticks))
    assert [record["status"] for record in records.values()] == ["ok", "skipped", "skipped"]
    assert "s of the budget are left" in records["b"]["reason"]


def hangs(setting: Setting) -> Iterator[Result]:
    time.sleep(5000)
    yield "never", {}


def dies(setting: Setting) -> Iterator[Result]:
    yield "before", {"x": 1}
    os._exit(3)


def test_a_part_in_a_process_of_its_own_may_hang_or_die():
    """As a kernel with a bad barrier or address would."""
    began = time.monotonic()
    parts = [Part("hangs", hangs, limit_s=0.5), Part("dies", dies, limit_s=100)]
    records = run(parts, execute=in_a_child)
    assert (records["hangs"]["status"], records["dies"]["status"]) == ("timeout", "error")
    assert records["dies"]["reason"] == "RuntimeError: its process died with exit code 3"
    assert records["dies"]["results"] == {"before": {"x": 1}}
    assert time.monotonic() - began < 500


def test_a_timed_program_makes_every_call():
    calls = []

    def op(x: jax.Array, shared: jax.Array) -> jax.Array:
        def see(value: np.ndarray) -> np.ndarray:
            calls.append(float(value[0]))
            return value

        return jax.pure_callback(see, jax.ShapeDtypeStruct(x.shape, x.dtype), x) + shared

    own = [(np.full(2, 1.0, np.float32),), (np.full(2, 2.0, np.float32),)]
    jax.block_until_ready(jax.jit(looped(op, rounds=5))(own, (np.float32(1),)))
    assert calls == [1.0, 2.0] * 5


def command(tmp_path: Any, **options: Any) -> tuple[int, Any]:
    out = tmp_path / "check.json"
    with pytest.raises(typer.Exit) as ended:
        device_check.main(out=out, seed=1, budget_s=100.0, **{"dry_run": True, "interpret": False} | options)
    return ended.value.exit_code, json.loads(out.read_text()) if out.exists() else None


@pytest.mark.parametrize("good", [True, False])
def test_the_command_writes_json_and_a_table(good, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setattr(device_check, "PARTS", (part("some_numerics", ("case", {"ok": good, "error": 0.5})),))
    monkeypatch.setattr(device_check, "COMPILED", part("compiled"))
    code, found = command(tmp_path)
    assert code == (0 if good else 1)
    assert {key: found[key] for key in ("dry_run", "seed", "backend", "budget_s", "ok")} == {
        "dry_run": True, "seed": 1, "backend": "xla", "budget_s": 100.0, "ok": good,
    }  # fmt: skip
    assert [one["name"] for one in found["parts"]] == ["some_numerics", "compiled"]
    assert found["parts"][0]["results"] == {"case": {"ok": good, "error": 0.5}}
    shown = capsys.readouterr()
    assert f"{int(good)} of 1 right" in shown.out and "seed 1" in shown.err


def test_without_a_gpu_it_says_so_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert command(tmp_path, dry_run=False) == (2, None)
    assert capsys.readouterr().err == "error: no Hopper or newer NVIDIA GPU here (jax sees cpu); try --dry-run\n"
