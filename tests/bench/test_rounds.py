"""Which rounds run, at which rate, and what is kept of them; the surface is a function that sleeps."""

import asyncio
import math
import statistics

import numpy as np
import pytest

from gimbal_jax.bench.load import LoadConfig
from gimbal_jax.bench.measurement import Measurement, summarise
from gimbal_jax.bench.replay import Call, SendFailed, Usage
from gimbal_jax.bench.rounds import Rate, Surface, grpc_surface, measure, median_summary, rate_of
from gimbal_jax.serving.engine.meters import PhaseTimes
from tests.serving.fake_server import FakeCore, running_server

LOAD = LoadConfig(requests=4, input_len=8, output_len=3, rounds=2, warmup=1)
PHASE = PhaseTimes("schedule", 1e-3, 1e-3, 2e-3)


class FakeSurface:
    """Three tokens in 30 ms; every ``failing``-th call is refused."""

    def __init__(self, failing: int | None = None) -> None:
        self.calls: list[Call] = []
        self.failing = failing

    async def send(self, call, on_tokens):
        self.calls.append(call)
        number = len(self.calls)
        for _ in range(3):
            await asyncio.sleep(0.01)
            on_tokens(1)
        if self.failing and number % self.failing == 0:
            raise SendFailed("full")
        return Usage(len(call.prompt), 3, 5)

    async def phases(self):
        return (PHASE,)

    def run(self, load=LOAD, rate=None, **options):
        surface = Surface("grpc", "here", "m", "ids", np.arange(500), self.send, self.phases)
        return asyncio.run(measure(surface, load, rate, **options))


def test_offline_rounds_after_the_warm_up():
    fake = FakeSurface()
    progress = []
    rounds = fake.run(profile=True, progress=lambda *done: progress.append(done))
    assert [(r.kind, r.number, r.rate) for r in rounds] == [
        ("warmup", 0, None),
        ("offline", 0, None),
        ("offline", 1, None),
    ]
    assert progress == [(done, 12) for done in range(13)]
    for r in rounds:
        assert (r.summary.requests, r.summary.failed, r.errors) == (4, 0, ())
        assert (r.summary.input_tokens, r.summary.output_tokens, r.summary.cached_tokens) == (32, 12, 20)
        assert r.summary.requests_per_s == pytest.approx(4 / r.summary.seconds)
        assert 0.03 <= r.summary.e2e_p50_s <= r.summary.seconds
        assert r.phases == (PHASE,) and 0 <= r.client_cpu_s < 1 and r.server_cpu_s is None
    assert len({call.prompt for call in fake.calls}) == 12


def test_online_rounds_at_a_share_of_the_offline_median():
    rounds = FakeSurface().run(rate=Rate(0.5, of_capacity=True))
    assert [r.kind for r in rounds] == ["warmup", "offline", "offline", "online", "online"]
    capacity = statistics.median(r.summary.requests_per_s for r in rounds[1:3])
    assert [r.rate for r in rounds[3:]] == [pytest.approx(0.5 * capacity)] * 2
    assert all(r.phases == () for r in rounds)


def test_online_rounds_at_a_rate_need_no_offline_ones():
    fake = FakeSurface()
    rounds = fake.run(rate=Rate(100.0, of_capacity=False))
    assert [(r.kind, r.rate) for r in rounds] == [("warmup", None), ("online", 100.0), ("online", 100.0)]
    assert sorted(call.arrival_s for call in fake.calls[4:8]) == [call.arrival_s for call in fake.calls[4:8]]
    assert rounds[1].summary.seconds >= max(call.arrival_s for call in fake.calls[4:8]) + 0.03


def test_failures_are_counted_and_told():
    rounds = FakeSurface(failing=4).run()
    assert [(r.summary.failed, r.errors) for r in rounds] == [(1, ("full",))] * 3
    assert [r.summary.output_tokens for r in rounds] == [9] * 3, "of those that succeeded"
    assert [r.kind for r in FakeSurface(failing=1).run(rate=Rate(0.7, of_capacity=True))] == [
        "warmup",
        *["offline"] * 2,
    ]


@pytest.mark.parametrize(
    ("load", "rate", "share", "result"),
    [
        ("offline", None, None, None),
        ("online", None, None, Rate(0.7, True)),
        ("online", None, 0.5, Rate(0.5, True)),
        ("online", 3.0, None, Rate(3.0, False)),
        ("offline", 1.0, None, "--rate and --share are for --load online"),
        ("offline", None, 0.7, "--rate and --share are for --load online"),
        ("online", 1.0, 0.7, "give one of them"),
        ("online", 0.0, None, "--rate must be above 0 and finite, not 0"),
        ("online", None, math.inf, "--share must be above 0 and finite, not inf"),
        ("online", math.nan, None, "--rate must be above 0 and finite, not nan"),
    ],
)
def test_rate_of_the_options(load, rate, share, result):
    if isinstance(result, str):
        with pytest.raises(ValueError, match=result):
            rate_of(load, rate, share)
    else:
        assert rate_of(load, rate, share) == result


def test_medians_are_of_each_field_where_it_is_known():
    def summary(ttft_s: float):
        return summarise([Measurement(0.0, 10, 1, ttft_s, e2e_s=ttft_s)])

    medians = median_summary([summary(1.0), summary(5.0), summary(2.0)])
    assert (medians["ttft_mean_s"], medians["requests_per_s"], medians["requests"]) == (2.0, 0.5, 1.0)
    assert math.isnan(medians["tpot_p50_s"])
    assert median_summary([summary(math.nan), summary(3.0)])["ttft_p99_s"] == 3.0


def test_without_a_tokenizer_prompts_are_any_token_but_special_ones():
    async def main():
        with FakeCore() as core:
            async with running_server(core) as (_, port, *_), grpc_surface(f"127.0.0.1:{port}") as surface:
                rounds = await measure(surface, LoadConfig(requests=5, input_len=50, output_len=2, rounds=1, warmup=0))
                return core, surface, rounds

    core, surface, (only,) = asyncio.run(asyncio.wait_for(main(), 60))
    assert surface.token_ids.tolist() == list(range(298))
    assert surface.model == "fake" and surface.prompts == "token ids of the whole vocabulary"
    assert (only.summary.output_tokens, only.summary.failed) == (10, 0)
    assert all(0 <= id < 298 for request in core.submitted for id in request.prompt)
