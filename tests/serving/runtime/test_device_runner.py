"""Steps on the devices themselves: enqueued ahead, with tokens that the host never had in its hands."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
import pytest

from gimbal_jax.config import MeshConfig
from gimbal_jax.scheduler.migration import plan_rounds
from gimbal_jax.serving.engine.plan import NOT_FINITE, ON_DEVICE, Adjustment, Chunk, Plan, StepResult
from gimbal_jax.serving.engine.request import SamplingParams
from gimbal_jax.serving.engine.runner import Pending
from gimbal_jax.serving.runtime.device_runner import DeviceRunner
from tests.e2e.rig import CONFIG, MODEL, compiled_runner
from tests.model.naive_sampling import bits
from tests.serving.runtime.plans import decode_rows, plan_of

ENGINE = CONFIG.engine
GREEDY = SamplingParams(max_tokens=99, temperature=0.0)


@pytest.fixture(scope="module")
def runner_of(runner) -> Callable[[int], DeviceRunner]:
    """Return the compiled runner of a number of engines."""
    alone = functools.cache(lambda: compiled_runner(MeshConfig(1, 1)))
    return lambda engines: runner if engines == 2 else alone()


@dataclass
class Sequence_:
    """One sequence, with an engine, a row and pages of its own."""

    engine: int
    row: int
    prompt: list[int]
    pages: list[int]
    params: SamplingParams
    allowed: np.ndarray | None = None
    suppress: tuple[int, ...] = ()
    output: list[int] = field(default_factory=list)
    """What the host knows of it."""
    planned: int = 0
    """Tokens that are computed once all planned steps are done."""

    def adjustment(self) -> Adjustment | None:
        """For the token after ``planned`` tokens, of which the host knows all but the last."""
        params = self.params if self.params.penalises or self.params.logit_bias else None
        if params is None and self.allowed is None and not self.suppress:
            return None
        history = None
        if self.params.penalises:
            history = np.array((self.prompt + self.output)[: self.planned - 1], np.int32)
            assert len(history) == self.planned - 1
        return Adjustment(self.suppress, self.allowed, history, len(self.prompt), params)


@dataclass(frozen=True)
class Share:
    """So many tokens of a sequence in a step."""

    sequence: int
    start: int
    count: int


def random_sequences(rng: np.random.Generator, engines: int, each: int) -> list[Sequence_]:
    found = []
    for engine in range(engines):
        rows, pages = rng.permutation(ENGINE.max_rows), rng.permutation(ENGINE.num_pages).tolist()
        for row in rows[:each].tolist():
            prompt = rng.integers(MODEL.vocab_size, size=rng.integers(1, 14)).tolist()
            own = [pages.pop() for _ in range(6)]
            found.append(Sequence_(engine, row, prompt, own, **random_settings(rng)))
    return found


def random_settings(rng: np.random.Generator) -> dict[str, Any]:
    ids = rng.permutation(MODEL.vocab_size)
    params = SamplingParams(
        max_tokens=99,
        temperature=float(rng.choice([0.0, 0.8])),
        top_k=int(rng.choice([0, 20])),
        top_p=float(rng.choice([1.0, 0.9])),
        seed=int(rng.integers(2**40)),
        logprobs=int(rng.integers(0, 4)) if rng.random() < 0.3 else None,
        frequency_penalty=float(rng.choice([0.0, 0.6])),
        repetition_penalty=float(rng.choice([1.0, 1.3])),
        logit_bias=tuple((int(token), 2.0) for token in ids[: rng.choice([0, 3])]),
    )
    allowed = bits(ids[:90].tolist(), MODEL.vocab_size) if rng.random() < 0.2 else None
    return {"params": params, "allowed": allowed, "suppress": tuple(ids[-2:].tolist()) if rng.random() < 0.2 else ()}


def random_steps(rng: np.random.Generator, sequences: Sequence[Sequence_], steps: int) -> list[list[Share]]:
    """Which sequences have a part in each step: prompts in chunks that fit, then a token at a time, with pauses."""
    done = [0] * len(sequences)
    found = []
    for _ in range(steps):
        shares, tiles = [], [2] * 2
        for i in rng.permutation(len(sequences)).tolist():
            sequence, missing = sequences[i], len(sequences[i].prompt) - done[i]
            if rng.random() < 0.2 or done[i] == len(sequence.pages) * ENGINE.page_size:
                continue
            if missing <= 0:
                shares.append(Share(i, done[i], 1))
                done[i] += 1
            elif tiles[sequence.engine]:
                count = min(int(rng.integers(1, missing + 1)), tiles[sequence.engine] * ENGINE.tile)
                tiles[sequence.engine] -= -(-count // ENGINE.tile)
                shares.append(Share(i, done[i], count))
                done[i] += count
        found.append(shares)
    return found


def plans_of(
    runner: DeviceRunner, sequences: Sequence[Sequence_], shares: Sequence[Share], rng: np.random.Generator | None
) -> list[Plan]:
    """Where ``rng`` says so, or the host does not know it, a token stays on the device."""
    plans = []
    for engine in range(runner.config.mesh.dp):
        decode: list[Any] = []
        adjustments: list[tuple[int, Adjustment]] = []
        prefill: list[Chunk] = []
        for share in shares:
            sequence = sequences[share.sequence]
            if sequence.engine != engine:
                continue
            known, end = sequence.prompt + sequence.output, share.start + share.count
            sequence.planned = end
            pages = sequence.pages[: -(-end // ENGINE.page_size)]
            adjustment = sequence.adjustment() if end >= len(sequence.prompt) else None
            if share.start >= len(sequence.prompt):
                stays = share.start >= len(known) or (rng is not None and rng.random() < 0.5)
                token = ON_DEVICE if stays else known[share.start]
                adjustments += [] if adjustment is None else [(len(decode), adjustment)]
                decode.append((sequence.row, token, share.start, pages, sequence.params))
            else:
                tokens = np.array(known[share.start : end], np.int32)
                params = sequence.params if end >= len(sequence.prompt) else None
                at = np.array(pages, np.int32)
                prefill.append(Chunk(sequence.row, tokens, share.start, at, params, adjustment))
        plans.append(plan_of(decode_rows(decode, ENGINE.pages_per_row, adjustments), prefill, tile=ENGINE.tile))
    return plans


def take(sequences: Sequence[Sequence_], plans: Sequence[Plan], results: Sequence[StepResult]) -> Iterator[Any]:
    """Gives each sequence its token, and yields what came of it."""
    of_row = {(sequence.engine, sequence.row): sequence for sequence in sequences}
    for engine, (plan, result) in enumerate(zip(plans, results, strict=True)):
        choosing = [*zip(plan.decode.row_D.tolist(), result.token_D.tolist(), strict=True)]
        choosing += [
            (chunk.row, int(token))
            for chunk, token in zip(plan.prefill, result.token_C, strict=True)
            if chunk.sampling is not None
        ]
        for row, token in choosing:
            of_row[engine, row].output.append(token)
            yield engine, row, token, result.logprobs.get(row)


def run(
    runner: DeviceRunner,
    sequences: Sequence[Sequence_],
    steps: Sequence[Sequence[Share]],
    *,
    ahead: bool,
    seed: int = 0,
) -> list[Any]:
    """What comes of each sequence in each step; with ``ahead`` a step is fetched once the next one is enqueued."""
    sequences = [replace(sequence, output=[], planned=0) for sequence in sequences]
    rng = np.random.default_rng(seed) if ahead else None
    in_flight: list[tuple[list[Plan], Pending]] = []
    found: list[Any] = []
    for shares in [*steps, None]:
        if shares is not None:
            plans = plans_of(runner, sequences, shares, rng)
            in_flight.append((plans, runner.enqueue(plans, lambda name: None)))
        while in_flight and (shares is None or len(in_flight) > ahead):
            plans, pending = in_flight.pop(0)
            found += take(sequences, plans, pending())
    return found


def tokens_by_sequence(found: Sequence[Any]) -> dict[tuple[int, int], list[int]]:
    tokens: dict[tuple[int, int], list[int]] = {}
    for engine, row, token, _ in found:
        tokens.setdefault((engine, row), []).append(token)
    return tokens


@pytest.mark.parametrize("engines", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("seed", range(4))
def test_tokens_kept_on_the_devices_equal_tokens_fed_by_the_host(runner_of, engines, seed):
    rng = np.random.default_rng([engines, seed])
    sequences = random_sequences(rng, engines, 6)
    steps = random_steps(rng, sequences, 14)
    fed = run(runner_of(engines), sequences, steps, ahead=False)
    assert len(fed) > 20 * engines
    assert run(runner_of(engines), sequences, steps, ahead=True, seed=seed) == fed


@pytest.mark.parametrize("engines", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_batching_and_chunking_change_no_token(runner_of, engines):
    rng = np.random.default_rng(engines)
    sequences = random_sequences(rng, engines, 6)
    together = tokens_by_sequence(run(runner_of(engines), sequences, random_steps(rng, sequences, 14), ahead=True))
    for i, sequence in enumerate(sequences):
        wanted = together[sequence.engine, sequence.row]
        prompt = len(sequence.prompt)
        alone = [[Share(i, 0, prompt)], *([Share(i, prompt + n, 1)] for n in range(len(wanted) - 1))]
        found = tokens_by_sequence(run(runner_of(engines), sequences, alone, ahead=True))
        assert found == {(sequence.engine, sequence.row): wanted}


def test_counts_are_those_of_the_steps_enqueued_before(runner_of):
    """Taken between two steps that are on their way, and waited for later."""
    runner, rng = runner_of(2), np.random.default_rng(5)
    sequences = [replace(one, params=GREEDY, allowed=None, suppress=()) for one in random_sequences(rng, 2, 4)]
    steps = random_steps(rng, sequences, 6)
    runner.begin_counts()()
    pending = []
    for shares in steps:
        plans = plans_of(runner, sequences, shares, None)
        results = runner.enqueue(plans, lambda name: None)
        pending.append(runner.begin_counts())
        list(take(sequences, plans, results()))
    per_token = MODEL.experts_per_token
    for shares, counts in zip(steps, pending, strict=True):
        tokens_S = [sum(x.count for x in shares if sequences[x.sequence].engine == s) for s in range(2)]
        counts_LSE = counts()
        assert counts_LSE.dtype == np.int64
        np.testing.assert_array_equal(
            counts_LSE.sum(axis=2), np.tile(np.array(tokens_S) * per_token, (len(MODEL.moe_layers), 1))
        )
    assert not runner.begin_counts()().any()


def test_experts_move_between_steps_in_flight(runner_of):
    runner, rng = runner_of(2), np.random.default_rng(6)
    sequences = random_sequences(rng, 2, 4)
    steps = random_steps(rng, sequences, 10)
    still = run(runner, sequences, steps, ahead=True)
    enqueue = runner.enqueue
    moved = 0

    def enqueue_and_move(plans, mark):
        nonlocal moved
        pending = enqueue(plans, mark)
        layer = int(rng.integers(len(MODEL.moe_layers)))
        wanted_E = rng.permutation(MODEL.num_experts).astype(np.int32)
        limits = CONFIG.mesh.ranks, CONFIG.placement.rows_per_pair
        for moves in plan_rounds(runner.slot_of_expert_LE[layer], wanted_E, *limits):
            runner.migrate(layer, moves)
            moved += len(moves.src_slot)
        return pending

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "enqueue", enqueue_and_move)
        assert tokens_by_sequence(run(runner, sequences, steps, ahead=True)) == tokens_by_sequence(still)
    assert moved > 20


def test_a_row_that_is_not_finite_does_not_affect_others(runner_of, monkeypatch):
    runner, sick = runner_of(2), 7
    prompts = [[1, 2, 3], [4, sick, 5], [6, 8, 9]]
    prompts_of = [
        Sequence_(0, row, prompt, [3 * row, 3 * row + 1, 3 * row + 2], replace(GREEDY, logit_bias=((sick, -100.0),)))
        for row, prompt in enumerate(prompts)
    ]
    steps = [[Share(i, 0, 3)] for i in range(3)]
    steps += [[Share(i, at, 1) for i in range(3)] for at in range(3, 9)]
    healthy = [[share for share in shares if share.sequence != 1] for shares in steps]
    expected = tokens_by_sequence(run(runner, prompts_of, healthy, ahead=True))

    table = runner.weights["embed"].get_value()
    ids_V1 = np.arange(MODEL.vocab_size)[:, None]
    poisoned = jax.device_put(np.where(ids_V1 == sick, np.nan, np.asarray(table)), table.sharding)
    monkeypatch.setattr(runner, "_leaves", [poisoned if leaf is table else leaf for leaf in runner._leaves])
    found = tokens_by_sequence(run(runner, prompts_of, steps, ahead=True))
    assert set(found.pop((0, 1))) == {NOT_FINITE}
    assert found == expected


@pytest.mark.slow
def test_log_probabilities_of_prompts_come_by_row(runner_of):
    runner = runner_of(1)
    prompt = np.array([5, 6, 7, 8, 9, 10, 11, 12, 13, 14], np.int32)
    chunk = Chunk(4, prompt, 0, np.arange(3, dtype=np.int32), None, None, prompt[1:], 2)
    none = decode_rows([], ENGINE.pages_per_row)
    [result] = runner.enqueue([plan_of(none, [chunk], tile=ENGINE.tile)], lambda name: None)()
    assert result.logprobs == {}
    assert list(result.prompt_logprobs) == [4]
    found = result.prompt_logprobs[4]
    assert len(found) == 9 and all(len(one.top_ids) == 2 and one.chosen <= one.top_values[0] < 0 for one in found)


@pytest.mark.slow
def test_a_step_marks_the_batch_and_takes_the_smallest_bucket(runner_of):
    runner, laps = runner_of(1), list[str]()
    none = decode_rows([], ENGINE.pages_per_row)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_steps", {runner.buckets[0]: runner._steps[runner.buckets[0]]})
        pending = runner.enqueue([plan_of(none, tile=ENGINE.tile)], laps.append)
    assert laps == ["batch"]
    [result] = pending()
    assert len(result.token_D) == len(result.token_C) == 0
