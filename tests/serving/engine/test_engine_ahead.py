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


def test_a_penalty_sees_all_tokens_but_the_last_with_a_step_in_flight():
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


def test_a_full_page_is_shared_once_its_tokens_are_known():
    engine, model = Engine(0, CONFIG, FCFS), PagedModel(CONFIG)
    engine.add(request("a", 6, 9, page_size=4))
    loop, cached = Ahead(engine, model, 1), []
    for _ in range(6):
        loop.tick()
        cached.append(engine.cached_pages)
    # The third step computes the eighth token, which the host gets to know in the tick after it was enqueued.
    assert cached == [1, 1, 2, 2, 2, 2]


def test_sampling_parameters_are_packed_by_row():
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
