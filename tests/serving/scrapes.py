"""Scrapes as tests read them, and a served server whose every family has samples."""

import asyncio
import contextlib
import dataclasses
import functools

from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gimbal_jax.config import PlacementConfig
from gimbal_jax.serving.engine.request import SamplingParams
from gimbal_jax.serving.frontend.frontend import Frontend
from gimbal_jax.serving.frontend.record import RequestRecord
from gimbal_jax.serving.monitoring.metrics import metrics_registry
from gimbal_jax.serving.monitoring.request_metrics import RequestHistograms
from tests.serving.core.ticked_core import CONFIG, open_core

BUSY = dataclasses.replace(CONFIG, placement=PlacementConfig("gimbal_refined", gamma=0.01, window_steps=6))


def samples(text: str) -> dict[tuple[str, ...], float]:
    """Values by name and label values, in the order of the labels' names."""
    return {
        (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Scraped:
    """A server ticked by hand behind a real frontend, with the records of its requests and all its scrapes."""

    def __init__(self, server, runner, clock: Clock) -> None:
        self.server, self.runner, self.clock = server, runner, clock
        self.records: list[RequestRecord] = []
        self.texts: list[str] = []
        self.tokens: list[int] = []
        histograms = RequestHistograms(server.config)

        def on_ended(record: RequestRecord) -> None:
            self.records.append(record)
            histograms.observe(record)

        self.frontend = Frontend(server, clock, on_ended=on_ended)
        self._registry = metrics_registry(self.frontend, histograms)

    def scrape(self) -> dict[tuple[str, ...], float]:
        self.texts.append(generate_latest(self._registry).decode())
        return samples(self.texts[-1])

    async def request(self, name: str, prompt: tuple[int, ...], max_tokens=4, leave_after=99, engine=None) -> None:
        """Uses one request up, or leaves after that many messages."""
        sampling = SamplingParams(max_tokens, temperature=0.0)
        with self.frontend.generate(name, prompt, sampling, engine=engine) as stream:
            messages = 0
            async for delta in stream:
                self.tokens.extend(delta.token_ids)
                messages += 1
                if messages == leave_after:
                    return

    async def run(self, *requests) -> None:
        """Tick, a tenth of a second each, until all have ended; scrape after every tick."""
        tasks = [asyncio.create_task(request) for request in requests]
        while not all(task.done() for task in tasks):
            await asyncio.sleep(0)
            self.tick()
            await asyncio.sleep(0)
            self.scrape()
        await asyncio.gather(*tasks)
        for _ in range(20):  # decisions and moves that are under way
            self.tick()
            await asyncio.sleep(0.001)

    def tick(self) -> None:
        self.server.tick(self.clock.now)
        self.clock.now += 0.1


@contextlib.contextmanager
def scraped(config=BUSY):
    """For use on an event loop."""
    clock = Clock()
    with open_core(config) as (server, runner, _):
        yield Scraped(server, runner, clock)


@functools.cache
def busy_scrapes() -> tuple[Scraped, dict[tuple[str, ...], float]]:
    """A server after thirty requests and a rebalance, and its last scrape. It is stopped: for reading only."""

    async def main():
        async with asyncio.timeout(120):
            with scraped() as server:
                for turn in range(6):
                    # The experts of these prompts lie on the ranks of the other engine, until they move.
                    far = (server.request(f"far{turn}.{n}", (2 * (1 - n),) * 8, 2, engine=n) for n in range(2))
                    near = (server.request(f"{turn}.{n}", tuple(range(3 + 2 * n)), 2 + n) for n in range(2))
                    await server.run(*far, *near, server.request(f"left{turn}", (1, 2), 9, leave_after=2))
                return server, server.scrape()

    return asyncio.run(main())
