"""The engine against a small deterministic model."""

import dataclasses

import numpy as np
import pytest

from gimbal_jax.scheduler.late import Capacity
from gimbal_jax.scheduler.queue import QueueItem
from gimbal_jax.serving.engine.engine import Engine
from gimbal_jax.serving.engine.plan import NOT_FINITE, Adjustment, Plan, StepResult
from gimbal_jax.serving.engine.request import TokenDelta, TokenLogprobs
from tests.serving.engine.paged_model import PagedModel, alone, request
from tests.serving.engine.stepped_engine import CONFIG, FCFS, SJF, commit, result, run, schedule, step

# -- pages ------------------------------------------------------------------


def test_the_youngest_is_preempted_and_recomputed():
    config = dataclasses.replace(CONFIG, num_pages=4, max_model_len=16)
    old, young = request("old", 6, 8, arrival=0.0, seed=1), request("young", 6, 8, arrival=1.0, sequence=2, seed=2)
    engine = Engine(0, config, FCFS)
    engine.add(young)
    engine.add(old)
    plans, news = zip(*run(engine, config), strict=True)
    # Each holds 2 pages; "old" needs its third for the 9th token, when "young" has 9 tokens, 8 of them computed.
    alone_again = [("old", 1)]
    assert [plan.all for plan in plans[2:6]] == [[("old", 1), ("young", 1)], *[alone_again] * 3]
    assert engine.preemptions == 1
    # "old" computes 13 of its 14 tokens; then "young" starts anew with all of its 9.
    assert [plan.prefill for plan in plans[8:9]] == [[("young", 9)]]
    outputs = [out for step_outputs in news for out in step_outputs]
    assert [result(outputs, req.id) for req in (old, young)] == [alone(old, config), alone(young, config)]
    assert engine.tokens_computed == 2 * 13 + 8


def test_a_step_that_preempts_a_started_prefill_admits_no_request():
    config = dataclasses.replace(CONFIG, num_pages=8, max_model_len=32)
    engine, model = Engine(0, config, FCFS), PagedModel(config)
    engine.add(request("old", 7, 9, sequence=1))  # 2 pages
    step(engine, model)
    engine.add(request("long", 22, sequence=2))  # the other 6 pages, and two steps of prefill
    engine.add(request("small", 2, sequence=3))
    step(engine, model)
    plan, _ = step(engine, model)  # "old" has 9 tokens now
    assert (plan.all, engine.preemptions, engine.free_pages) == ([("old", 1)], 1, 5)
    assert engine.trace(0.0, 0.0).waiting_prefill_tokens == 22 + 2


def test_a_lone_sequence_can_fill_the_whole_pool():
    config = dataclasses.replace(CONFIG, num_pages=3, max_model_len=64)
    req = request("a", 5, max_tokens=50)
    engine = Engine(0, config, SJF)
    engine.add(req)
    tokens, reason = result([out for _, outputs in run(engine, config) for out in outputs], "a")
    assert (tokens, reason) == alone(req, config)
    assert len(tokens) == 3 * 4 - 5
    assert engine.preemptions == 0


def test_cancel_frees_pages_even_with_a_step_in_flight():  # trap 19
    engine, model = Engine(0, CONFIG, FCFS), PagedModel(CONFIG)
    engine.add(request("a", 9, max_tokens=1))
    engine.add(request("b", 2, sequence=2))
    planned = schedule(engine)
    results = model(planned.plan)
    assert engine.cancel("a")
    assert not engine.cancel("a")
    assert not engine.cancel("never seen")
    assert engine.free_pages == CONFIG.num_pages - 1
    outputs = commit(engine, planned, results)
    assert [out.request_id for out in outputs] == ["b"]
    assert engine.tokens_computed == 11  # they went through the model and were counted there
    assert engine.free_pages == CONFIG.num_pages - 1


# -- what a request asks for besides tokens --------------------------------


def answer(plan: Plan, choose=lambda row, adjustment: 5) -> StepResult:
    """What devices would give: the tokens of ``choose``, and as the log probability of a prompt token the token."""
    adjustments = dict(plan.decode.adjustments)
    token_D = [choose(row, adjustments.get(i)) for i, row in enumerate(plan.decode.row_D.tolist())]
    token_C = [choose(chunk.row, chunk.adjustment) for chunk in plan.prefill]
    targets = {
        chunk.row: tuple(TokenLogprobs(float(token), (), ()) for token in chunk.targets)
        for chunk in plan.prefill
        if chunk.targets is not None
    }
    return StepResult(np.array(token_D, np.int32), np.array(token_C, np.int32), {}, targets)


def first_output(engine: Engine) -> TokenDelta:
    """Step until something comes out."""
    for _ in range(50):
        if outputs := step(engine, answer)[1]:
            return outputs[0]
    raise AssertionError("nothing came out")


@pytest.mark.parametrize("prompt_tokens", [1, 2, 16, 17, 40])
def test_prompt_logprobs_cover_all_prompt_tokens_but_the_first(prompt_tokens):
    engine = Engine(0, CONFIG, FCFS)
    engine.add(request("a", prompt_tokens, prompt_logprobs=2))
    output = first_output(engine)
    assert [entry.chosen for entry in output.prompt_logprobs] == list(range(1, prompt_tokens))
    assert first_output(engine).prompt_logprobs == ()


def test_a_preempted_prefill_repeats_no_prompt_logprob():
    config = dataclasses.replace(CONFIG, num_pages=8, max_model_len=32)
    engine = Engine(0, config, FCFS)
    engine.add(request("old", 7, 9, sequence=1))
    first_output(engine)
    engine.add(request("long", 22, 1, sequence=2, prompt_logprobs=0))
    outputs: list[TokenDelta] = []
    now = 0.0
    while not engine.idle:
        outputs += step(engine, answer, now := now + 1)[1]
    assert engine.preemptions == 1
    (output,) = [output for output in outputs if output.request_id == "long"]
    assert output.started == 1.0
    assert [entry.chosen for entry in output.prompt_logprobs] == list(range(1, 22))


def test_a_penalty_sees_all_tokens_and_the_prompt_length():
    engine = Engine(0, CONFIG, FCFS)
    engine.add(request("a", 3, presence_penalty=1.0))
    asked = [one for planned, _ in run(engine, CONFIG) for one in adjustments_of(planned.plan)]
    histories = [(np.array(one.history).tolist(), one.prompt_tokens) for one in asked]
    assert all(one.params is not None and one.params.presence_penalty == 1.0 for one in asked)
    out = first_tokens(4)
    # Without the last token to compute, which the step has.
    assert histories == [([0, 1, 2, *out[:n]][:-1], 3) for n in range(4)]


def adjustments_of(plan: Plan) -> list[Adjustment]:
    of_chunks = [chunk.adjustment for chunk in plan.prefill if chunk.adjustment is not None]
    return [adjustment for _, adjustment in plan.decode.adjustments] + of_chunks


class Turns:
    """A grammar that allows token 0, then token 1, and so on."""

    def __init__(self) -> None:
        self.turn = 0

    def allowed(self) -> np.ndarray:
        return np.array([1 << self.turn], np.int32)

    def accept(self, token_id: int) -> None:
        self.turn += 1


def lowest_allowed(plan: Plan) -> StepResult:
    """The lowest token that each row's grammar allows, and 6 without a grammar."""
    return answer(plan, lambda row, asked: int(asked.allowed[0]).bit_length() - 1 if asked is not None else 6)


def test_a_grammar_follows_its_own_sequence():
    engine = Engine(0, CONFIG, FCFS)
    for number, grammar in enumerate([Turns(), None, Turns()], start=1):
        engine.add(dataclasses.replace(request(number, number, sequence=number), grammar=grammar))
    outputs = []
    while not engine.idle:
        outputs += step(engine, lowest_allowed)[1]
    assert [result(outputs, name)[0] for name in "123"] == [(0, 1, 2, 3), (6, 6, 6, 6), (0, 1, 2, 3)]


def test_min_tokens_yield_to_a_grammar_that_only_ends():
    engine = Engine(0, CONFIG, FCFS)
    asked = request("a", 3, max_tokens=4, min_tokens=2, stop_token_ids=(1, 2))
    engine.add(dataclasses.replace(asked, grammar=Turns()))  # allows 0, then 1, 2 and 3
    suppressed, outputs = [], []
    while not engine.idle:
        planned, news = step(engine, lowest_allowed)
        suppressed.append(adjustments_of(planned.plan)[0].suppress)
        outputs += news
    assert suppressed == [(1, 2), (), ()]
    assert result(outputs, "a") == ((0, 1), "stop")


def test_logits_that_are_not_finite_fail_their_request_alone():
    engine = Engine(0, CONFIG, FCFS)
    engine.add(request("bad", 9, page_size=CONFIG.page_size))
    engine.add(request("good", 3, sequence=2))
    planned = schedule(engine)
    assert engine.cached_pages == 2
    tokens_C = np.array([NOT_FINITE, 1], np.int32)
    bad, good = commit(engine, planned, StepResult(np.zeros(0, np.int32), tokens_C, {}, {}))
    assert (bad.finish_reason, bad.error, good.token_ids) == ("error", "its logits are not finite", (1,))
    assert engine.cached_pages == 0, "no request may share its pages"
    planned = schedule(engine)
    assert planned.all == [("good", 1)]
    (good,) = commit(engine, planned, answer(planned.plan, lambda row, adjustment: NOT_FINITE))
    assert good.finish_reason == "error" and engine.idle and engine.free_pages == CONFIG.num_pages


def test_the_first_output_has_the_time_of_the_first_step():
    engine = Engine(0, CONFIG, FCFS)
    engine.add(request("a", 20, 2))
    started = []
    for now in (1.0, 2.0, 3.0):
        started += [out.started for out in step(engine, answer, now)[1]]
    assert started == [1.0, None]


# -- ends -------------------------------------------------------------------


def first_tokens(count) -> list[int]:
    return list(alone(request("a", 3, max_tokens=count), CONFIG)[0])


def test_a_stop_token_ends_and_is_reported_but_not_emitted():
    free = first_tokens(8)
    stop = free[3]
    engine = Engine(0, CONFIG, FCFS)
    engine.add(request("a", 3, max_tokens=8, stop_token_ids=(stop,)))
    outputs = [out for _, news in run(engine, CONFIG) for out in news]
    assert [t for out in outputs for t in out.token_ids] == free[: free.index(stop)]
    assert outputs[-1] == TokenDelta("a", (), finish_reason="stop", stop=stop)


def test_stop_tokens_are_suppressed_until_min_tokens_are_out():
    engine = Engine(0, CONFIG, FCFS)
    engine.add(request("a", 3, max_tokens=4, min_tokens=2, stop_token_ids=(1, 2)))
    suppressed = [[one.suppress for one in adjustments_of(planned.plan)] for planned, _ in run(engine, CONFIG)]
    assert suppressed[:2] == [[(1, 2)], [(1, 2)]]
    assert not any(suppressed[2:])
    assert len(suppressed) > 2


def test_a_stop_token_that_comes_before_min_tokens_does_not_end():
    engine = Engine(0, CONFIG, FCFS)
    engine.add(request("a", 3, max_tokens=4, min_tokens=1, stop_token_ids=(1,)))
    (first,), (out,) = [step(engine, lambda plan: answer(plan, lambda row, adjustment: 1))[1] for _ in range(2)]
    assert first == TokenDelta("a", (1,))
    assert (out.token_ids, out.finish_reason) == ((), "stop")


def test_model_length_ends_a_request():
    config = dataclasses.replace(CONFIG, max_model_len=10)
    engine = Engine(0, config, FCFS)
    engine.add(request("a", 7, max_tokens=50))
    tokens, reason = result([out for _, news in run(engine, config) for out in news], "a")
    assert (len(tokens), reason) == (3, "length")


def test_logprobs_come_only_if_requested():
    engine, model = Engine(0, CONFIG, FCFS), PagedModel(CONFIG)
    engine.add(request("with", 3, logprobs=1))
    engine.add(request("without", 3, sequence=2))
    outputs = {out.request_id: out for out in step(engine, model)[1]}
    (token,) = outputs["with"].token_ids
    assert outputs["with"].logprobs == (TokenLogprobs(-0.5, (token,), (-0.5,)),)
    assert outputs["without"].logprobs == ()


def test_fail_all_ends_everything():
    engine, model = Engine(0, CONFIG, FCFS), PagedModel(CONFIG)
    for i in range(6):
        engine.add(request(i, 5, sequence=i + 1))
    step(engine, model)
    outputs = engine.fail_all("device lost")
    assert sorted(out.request_id for out in outputs) == ["0", "1", "2", "3", "4", "5"]
    assert {(out.finish_reason, out.error) for out in outputs} == {("error", "device lost")}
    assert engine.idle
    assert engine.free_pages == CONFIG.num_pages


# -- limits and trace -------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_budget": 3}, "token_budget must be at least"),
        ({"tile": 32}, "token_budget must be at least"),
        ({"page_size": 0}, "page_size must be at least 1"),
    ],
)
def test_impossible_limits_are_rejected(change, message):
    with pytest.raises(ValueError, match=message):
        Engine(0, dataclasses.replace(CONFIG, **change), FCFS)


def test_trace_by_hand():
    engine, model = Engine(2, CONFIG, FCFS), PagedModel(CONFIG)
    engine.add(request("a", 3, sequence=4))
    engine.add(request("b", 30, sequence=7))
    step(engine, model)  # a done with prefill; 12 tokens of b (no tile is left for the 13th)
    engine.add(request("c", 10, sequence=9))
    trace = engine.trace(8.5, expert_pressure=1.5)
    assert (trace.engine, trace.time, trace.seen, trace.expert_pressure) == (2, 8.5, 9, 1.5)
    assert (trace.running_prefill_tokens, trace.waiting_prefill_tokens) == (18, 10)
    assert (trace.running_requests, trace.waiting_requests) == (2, 1)
    assert trace.kv_use == (1 + 8) / 32  # pages for 4 and for 31 tokens
    assert (trace.kv_tokens, trace.waiting_tokens) == (3 + 12, 10)


def test_capacity_by_hand():
    config = dataclasses.replace(CONFIG, num_pages=12)
    engine, model = Engine(0, config, FCFS), PagedModel(config)
    assert engine.capacity() == Capacity(decode_rows=0, free_rows=4, free_pages=12, prefills=())
    engine.add(request("a", 3, max_tokens=9, sequence=1))  # a page; for its fifth token a second one
    engine.add(request("b", 24, arrival=1.0, sequence=2))  # 7 pages; 12 of its tokens fit beside a
    assert engine.capacity().free_rows == 0  # who waits here comes first
    step(engine, model)
    assert engine.capacity() == Capacity(1, 2, 4, (QueueItem(1.0, 12, waited_tokens=15),))
    step(engine, model)
    assert engine.capacity() == Capacity(2, 2, 3, ())
    assert engine.prefill_tokens == 3 + 24
    engine.add(request("c", 11, arrival=2.0, sequence=3))  # the last 3 pages
    step(engine, model)
    step(engine, model)
    assert engine.free_pages == 0
    assert engine.capacity() == Capacity(3, 0, 0, ())  # c needs a page for its 13th token: the next step will preempt


def test_pages_of_ended_requests_are_no_pressure():
    engine, model = Engine(0, CONFIG, FCFS), PagedModel(CONFIG)
    engine.add(request("a", 9, max_tokens=1))
    step(engine, model)
    trace = engine.trace(0.0, 0.0)
    assert (trace.kv_use, trace.kv_tokens, trace.running_requests) == (0, 0, 0)
