"""The traffic that placement decides on is exactly what the model computed."""

from importlib import resources

import numpy as np

from gimbal_jax.bench.replay import read_trace
from gimbal_jax.serving.engine.plan import ON_DEVICE
from gimbal_jax.serving.engine.request import Request
from tests.e2e.naive_model import routes
from tests.e2e.rig import (
    CONFIG,
    EXPERTS,
    LAYERS,
    MODEL,
    SOURCES,
    TICK_S,
    TOP_K,
    random_sampling,
    session,
)
from tests.serving.statuses import per_engine

NEAR_TIE = 1e-4
"""Router logits this close may be ordered differently in float32."""


class Recorder:
    """A runner that notes each computed token with all before it, which it reads from the pages as the model does."""

    def __init__(self, runner):
        self._runner = runner
        self.contexts: list[tuple[int, tuple[int, ...], int]] = []
        """(source, tokens up to the last computed one, how many of the last were computed)."""
        self._page_tokens = np.full((SOURCES, CONFIG.engine.num_pages, CONFIG.engine.page_size), -1)
        self._chosen_SR = np.zeros((SOURCES, CONFIG.engine.max_rows), np.int32)

    def __getattr__(self, name):
        return getattr(self._runner, name)

    def enqueue(self, plans, mark):
        wait = self._runner.enqueue(plans, mark)

        def pending():
            """Here the tokens that the step left to the devices are known."""
            results = wait()
            for s, (plan, result) in enumerate(zip(plans, results, strict=True)):
                self._note(s, plan)
                self._chosen_SR[s, plan.decode.row_D] = result.token_D
                self._chosen_SR[s, [chunk.row for chunk in plan.prefill]] = result.token_C
            return results

        return pending

    def _note(self, s, plan):
        decode, page_size = plan.decode, CONFIG.engine.page_size
        token_D = np.where(decode.token_D == ON_DEVICE, self._chosen_SR[s, decode.row_D], decode.token_D)
        chunks = [*zip(token_D[:, None], decode.start_D.tolist(), decode.page_table_DM, strict=True)]
        chunks += [(chunk.tokens, chunk.start, chunk.pages) for chunk in plan.prefill]
        for tokens, start, pages in chunks:
            places = np.arange(start, start + len(tokens))
            self._page_tokens[s, pages[places // page_size], places % page_size] = tokens
            context = self._page_tokens[s, pages].reshape(-1)[: places[-1] + 1]
            self.contexts.append((s, tuple(context.tolist()), len(places)))

    def recount(self) -> tuple[np.ndarray, int]:
        """A[l, s, e] by running every context through the naive model, and how many choices were nearly ties."""
        counts_LSE = np.zeros((LAYERS, SOURCES, EXPERTS), np.int64)
        near_ties = 0
        known: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
        for s, context, count in sorted(self.contexts, key=lambda c: len(c[1]), reverse=True):
            # A prefix of a longer sequence routes as it does there.
            if context not in known:
                chosen_TLE, margin_TL = routes(context)
                known |= {context[:n]: (chosen_TLE[:n], margin_TL[:n]) for n in range(1, len(context) + 1)}
            chosen_TLE, margin_TL = known[context]
            counts_LSE[:, s] += chosen_TLE[-count:].sum(axis=0)
            near_ties += int((margin_TL[-count:] < NEAR_TIE).sum())
        return counts_LSE, near_ties


def trace_requests(rng):
    """The shipped trace, shrunk to the tiny model; times in ticks of the manual clock."""
    with resources.as_file(resources.files("gimbal_jax") / "data" / "azure_llm_2023_conv.csv") as path:
        rows = read_trace(path)[:90]
    requests = []
    for i, row in enumerate(rows):
        # Every third of the trace engine 1 gets nothing and idles.
        engine = 0 if i // 30 == 1 else i % SOURCES
        prompt = rng.integers(MODEL.vocab_size, size=min(1 + row.input_tokens // 20, 48)).tolist()
        sampling = random_sampling(rng, min(1 + row.output_tokens // 8, 32))
        requests.append(Request(f"r{i}", tuple(prompt), sampling, row.arrival_s * 2 * TICK_S, engine, i + 1))
    return requests


def test_counts_equal_tokens_served_and_a_naive_recount(runner):
    rng = np.random.default_rng(5)
    requests = trace_requests(rng)
    recorder = Recorder(runner)
    with session(recorder, policy="eplb", window_steps=10) as replay:
        server, waiting, live, one_idle = replay.server, list(requests), [], 0
        while waiting or not replay.idle:
            while waiting and waiting[0].arrival <= replay.now:
                live.append(waiting[0].id)
                server.submit(waiting.pop(0))
            if live and rng.random() < 0.05:
                server.cancel(live.pop(rng.integers(len(live))))
            replay.tick()
            one_idle += len({engine.idle for engine in server.engines}) == 2
        status = server.status()

    # The replay had everything that could disturb the counts.
    assert status.preemptions > 0
    assert len(replay.ends) < len(requests), "none was cancelled"
    assert one_idle > 20
    assert status.placement.totals.experts_moved > 0
    assert len(status.placement.records) > 3
    assert per_engine(status, "free_pages") == (CONFIG.engine.num_pages,) * SOURCES

    counted_LSE, tokens_S = status.placement.total_counts_LSE, np.array(per_engine(status, "tokens_computed"))
    assert np.array_equal(counted_LSE.sum(axis=2), np.tile(tokens_S * TOP_K, (LAYERS, 1)))
    assert counted_LSE.sum() == tokens_S.sum() * TOP_K * LAYERS
    assert tokens_S.tolist() == [sum(n for source, _, n in recorder.contexts if source == s) for s in range(SOURCES)]

    recount_LSE, near_ties = recorder.recount()
    assert near_ties < 0.01 * tokens_S.sum()
    assert np.abs(counted_LSE - recount_LSE).sum() <= 2 * near_ties
