"""Steps that are planned before the results of the one before are known."""

import dataclasses

import numpy as np

from gimbal_jax.serving.engine.engine import Engine
from gimbal_jax.serving.engine.plan import LOGPROBS, ON_DEVICE, SEED
from gimbal_jax.serving.engine.request import SamplingParams
from tests.serving.engine.paged_model import PagedModel, alone, request
from tests.serving.engine.stepped_engine import CONFIG, FCFS, Ahead, commit, result, schedule


def test_the_next_step_takes_the_token_from_the_devices():
    engine, model = Engine(0, CONFIG, FCFS), PagedModel(CONFIG)
    asked = request("a", 5, 3)
    engine.add(asked)
    plans, results = [], []
    for _ in range(2):
        plans.append(schedule(engine))
        results.append(model(plans[-1].plan))
    decode = plans[1].plan.decode
    assert (decode.token_D.tolist(), decode.start_D.tolist()) == ([ON_DEVICE], [5])
    (first,) = commit(engine, plans[0], results[0])
    third = schedule(engine)
    assert third.plan.decode.start_D.tolist() == [6]
    (second,) = commit(engine, plans[1], results[1])
    assert schedule(engine).all == []  # its last token is on the way
    (last,) = commit(engine, third, model(third.plan))
    assert [*first.token_ids, *second.token_ids, *last.token_ids] == list(alone(asked, CONFIG)[0])
    assert (last.finish_reason, engine.free_pages, engine.tokens_computed) == ("length", CONFIG.num_pages, 5 + 2)


def test_a_stop_is_seen_one_step_late_and_its_pages_can_be_used_at_once():
    config = dataclasses.replace(CONFIG, num_pages=4, max_model_len=16)
    free = alone(request("a", 3, 9), config)[0]
    stop = next(token for token in free if token != free[0])
    ending = request("a", 3, 9, stop_token_ids=(stop,))
    other = request("b", 12, 2, sequence=2, seed=5)  # needs all 4 pages
    engine, model = Engine(0, config, FCFS), PagedModel(config)
    engine.add(ending)
    loop, outputs, plans = Ahead(engine, model, 1), [], []
    engine.add(other)
    while not loop.idle:
        planned, news = loop.tick()
        plans.append(planned.all)
        outputs += news
    assert result(outputs, "a") == alone(ending, config)
    assert result(outputs, "b") == alone(other, config)
    late = free.index(stop) + 1  # the step after the one that chose the stop token
    assert plans[late : late + 2] == [[("a", 1)], [("b", 12)]]
    assert engine.tokens_computed == 3 + late + 12 + 1


def test_whoever_gets_the_row_of_one_cancelled_is_not_given_its_token():
    config = dataclasses.replace(CONFIG, max_rows=1)
    engine, model = Engine(0, config, FCFS), PagedModel(config)
    engine.add(request("a", 3, 9))
    first = schedule(engine)
    first_result = model(first.plan)
    engine.cancel("a")
    follower = request("b", 2, 3, sequence=2, seed=1)
    engine.add(follower)
    second = schedule(engine)
    assert second.plan.prefill[0].row == first.plan.prefill[0].row
    second_result = model(second.plan)
    assert commit(engine, first, first_result) == []
    outputs = commit(engine, second, second_result) + Ahead(engine, model, 1).run()
    assert result(outputs, "b") == alone(follower, config)


def test_a_preempted_sequence_chooses_the_token_on_the_way_again():
    config = dataclasses.replace(CONFIG, num_pages=4, max_model_len=16)
    engine, model = Engine(0, config, FCFS), PagedModel(config)
    old, young = request("old", 6, 8, seed=1), request("young", 6, 8, arrival=1.0, sequence=2, seed=2)
    for one in (old, young):
        engine.add(one)
    outputs = Ahead(engine, model, 1).run()
    assert engine.preemptions == 1
    for one in (old, young):
        assert result(outputs, one.id) == alone(one, config)


def test_a_penalty_lacks_no_token_but_the_one_that_the_step_has():
    engine, model = Engine(0, CONFIG, FCFS), PagedModel(CONFIG)
    engine.add(request("a", 3, 6, presence_penalty=1.0))
    loop, histories = Ahead(engine, model, 1), []
    outputs = []
    while not loop.idle:
        planned, news = loop.tick()
        outputs += news
        histories += [np.array(adjustment.history).tolist() for _, adjustment in planned.plan.decode.adjustments]
    tokens, _ = result(outputs, "a")
    assert histories == [[0, 1, 2, *tokens[:n]] for n in range(5)]


class LastTokens:
    """Allows all tokens; remembers those that it was told."""

    def __init__(self) -> None:
        self.told: list[int] = []

    def allowed(self) -> np.ndarray:
        return np.array([0x7F], np.int32)

    def accept(self, token_id: int) -> None:
        self.told.append(token_id)


def test_a_grammar_has_seen_every_token_before_the_next_step_and_loses_no_step_by_it():
    engine, model, grammar = Engine(0, CONFIG, FCFS), PagedModel(CONFIG), LastTokens()
    engine.add(dataclasses.replace(request("a", 3, 6), grammar=grammar))
    engine.add(request("b", 3, 6, sequence=2, seed=3))
    loop, outputs, plans = Ahead(engine, model, 1), [], []
    while not loop.idle:
        seen = len(grammar.told)
        planned, news = loop.tick()
        outputs += news
        plans.append(planned.all)
        if ("a", 1) in planned.decode:
            assert len(grammar.told) == seen + 1
    assert plans == [[("a", 3), ("b", 3)], *[[("a", 1), ("b", 1)]] * 5, []]
    assert [result(outputs, name)[0] for name in "ab"] == [
        alone(request("a", 3, 6), CONFIG)[0],
        alone(request("b", 3, 6, seed=3), CONFIG)[0],
    ]


def test_a_full_page_is_shared_once_its_tokens_are_known():
    engine, model = Engine(0, CONFIG, FCFS), PagedModel(CONFIG)
    engine.add(request("a", 6, 9, page_size=4))
    loop, cached = Ahead(engine, model, 1), []
    for _ in range(6):
        loop.tick()
        cached.append(engine.cached_pages)
    # The third step computes the eighth token, which the host gets to know in the tick after it was enqueued.
    assert cached == [1, 1, 2, 2, 2, 2]


def test_the_parameters_of_a_row_are_those_of_its_sequence():
    engine, model = Engine(0, CONFIG, FCFS), PagedModel(CONFIG)
    asked = SamplingParams(9, temperature=0.5, top_k=3, top_p=0.75, min_p=0.25, seed=2**40 + 7, logprobs=2)
    engine.add(request("plain", 2, 9))
    engine.add(dataclasses.replace(request("asked", 2, sequence=2), sampling=asked))
    Ahead(engine, model, 1).tick()
    planned = schedule(engine)
    assert planned.decode == [("plain", 1), ("asked", 1)]
    sampling_DX = planned.plan.decode.sampling_DX
    assert sampling_DX[:, [0, 2, 3]].view(np.float32).tolist() == [[1.0, 1.0, 0.0], [0.5, 0.75, 0.25]]
    assert sampling_DX[:, [1, SEED, LOGPROBS]].tolist() == [[0, 0, -1], [3, 7, 2]]
    assert planned.plan.logprobs == ((1, 1, 2),)
