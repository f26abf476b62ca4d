"""One request as n sequences over the real frontend and a fake core, without sockets."""

import asyncio
import dataclasses
from typing import Any

import pytest

from gimbal_jax.exceptions import DuplicateRequest, GenerationFailed, QueueFull
from gimbal_jax.serving.engine.request import SamplingParams, TokenDelta
from gimbal_jax.serving.frontend.choices import Generation, run_choices
from gimbal_jax.serving.text.tokenizer import load_tokenizer
from tests.serving.fake_server import MODEL, until, write_model_folder
from tests.serving.frontend.test_frontend import with_frontend

THREE = Generation(prompt=(1,), sampling=SamplingParams(max_tokens=3, seed=2**32 - 1), n=3)


def start(frontend, generation=THREE, request_id="x", new_decoder=None):
    """Return a task that collects all deltas, by choice."""

    async def collect():
        news: dict[int, list[TokenDelta]] = {}
        async for index, delta in run_choices(frontend, request_id, generation, new_decoder):
            news.setdefault(index, []).append(delta)
        return news

    return asyncio.create_task(collect())


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))


def text_generation(tokenizer, prompt, stops=(), *, include=False, **sampling):
    params = SamplingParams(logprobs=0, **sampling)
    return Generation(tuple(tokenizer.encode(prompt)), params, stops=stops, include_stop=include)


@with_frontend()
async def test_each_choice_is_its_own_sequence(core, frontend):
    new_grammar: Any = object
    task = start(frontend, dataclasses.replace(THREE, new_grammar=new_grammar, engine=1))
    await until(lambda: len(core.submitted) == 3)
    assert [request.label for request in core.submitted] == ["0_x", "1_x", "2_x"]
    assert [request.sampling.seed for request in core.submitted] == [2**32 - 1, 0, 1]
    assert len({id(request.grammar) for request in core.submitted}) == 3
    assert {request.engine for request in core.submitted} == {1}
    for _ in range(3):
        core.step()
    news = await task
    assert sorted(news) == [0, 1, 2]
    for deltas in news.values():
        assert [token for delta in deltas for token in delta.token_ids] == [2, 3, 4]
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == ["length"]
    assert frontend.active == 0 and core.cancelled == []


@with_frontend()
async def test_a_single_choice_has_the_id_of_the_request(core, frontend):
    start(frontend, dataclasses.replace(THREE, n=1))
    await until(lambda: core.submitted)
    assert core.submitted[0].label == "x"


@with_frontend()
async def test_abort_ends_all_choices_and_frees_the_id(core, frontend):
    task = start(frontend)
    await until(lambda: len(core.submitted) == 3)
    frontend.abort(["x"])
    news = await task
    assert [deltas[-1].finish_reason for deltas in news.values()] == ["abort"] * 3
    assert core.live == []
    start(frontend)
    await until(lambda: len(core.submitted) == 6)


@with_frontend()
async def test_a_running_id_is_rejected_for_any_number_of_choices(core, frontend):
    task = start(frontend)
    await until(lambda: len(core.submitted) == 3)
    for n in (1, 2):
        with pytest.raises(DuplicateRequest, match="'x'"):
            await start(frontend, dataclasses.replace(THREE, n=n))
    assert len(core.submitted) == 3
    core.fail(core.submitted[0].id, "poisoned")
    with pytest.raises(GenerationFailed, match="poisoned"):
        await task
    assert frontend.active == 0


@with_frontend()
async def test_an_error_of_one_choice_ends_the_others(core, frontend):
    task = start(frontend)
    await until(lambda: len(core.submitted) == 3)
    core.fail(core.submitted[1].id, "poisoned")
    with pytest.raises(GenerationFailed, match="poisoned"):
        await task
    assert core.live == [] and frontend.active == 0
    assert frontend.counters.outcomes == {"error": 1, "cancelled": 2}


@with_frontend(max_queue=2)
async def test_a_request_is_rejected_if_one_choice_does_not_fit(core, frontend):
    with pytest.raises(QueueFull):
        await start(frontend)
    assert core.live == [] and frontend.active == 0


@with_frontend()
async def test_leaving_early_leaves_nothing_running(core, frontend):
    deltas = run_choices(frontend, "x", THREE)
    first = asyncio.create_task(anext(deltas))
    await until(lambda: len(core.submitted) == 3)
    core.step()
    await first
    await deltas.aclose()
    assert core.live == [] and frontend.active == 0
    assert len(asyncio.all_tasks()) == 1


def test_text_and_stop_string_across_tokens(tokenizer):
    generation = text_generation(tokenizer, "a", ("cx", "de"), max_tokens=10)

    @with_frontend()
    async def test(core, frontend):
        task = start(frontend, generation, new_decoder=tokenizer.decoder)
        await until(lambda: core.submitted)
        for _ in range(5):
            core.step()
            await asyncio.sleep(0.01)
        deltas = (await task)[0]
        assert "".join(delta.text for delta in deltas) == "bc"
        # "c" and "d" might have begun a stop string when they came.
        assert [delta.text for delta in deltas] == ["b", "", "c", ""]
        tokens = [token for delta in deltas for token in delta.token_ids]
        assert tokenizer.decode(tokens) == "bcde"
        assert sum(len(delta.logprobs) for delta in deltas) == 4
        assert (deltas[-1].finish_reason, deltas[-1].stop) == ("stop", "de")
        assert core.live == [] and frontend.counters.outcomes == {"stop": 1}

    test()


@pytest.mark.parametrize(
    ("stops", "options", "text", "tokens"),
    [
        (("de",), {"include": True}, "bcde", "bcde"),
        (("de",), {"min_tokens": 3}, "bc", "bcde"),
        (("de",), {"min_tokens": 4}, "bcdefgh", "bcdefgh"),
        (("h!",), {}, "bcdefgh", "bcdefgh"),
        (("h",), {}, "bcdefg", "bcdefgh"),
    ],
)
def test_a_stop_string_cuts_text_and_tokens(tokenizer, stops, options, text, tokens):
    generation = text_generation(tokenizer, "a", stops, max_tokens=7, **options)

    @with_frontend()
    async def test(core, frontend):
        task = start(frontend, generation, new_decoder=tokenizer.decoder)
        await until(lambda: core.submitted)
        for _ in range(7):  # all tokens arrive before one is read, and the output ends at the same place
            core.step()
        deltas = (await task)[0]
        assert "".join(delta.text for delta in deltas) == text
        assert tokenizer.decode([token for delta in deltas for token in delta.token_ids]) == tokens
        ends_by_stop = len(tokens) < 7 or text != tokens
        assert deltas[-1].finish_reason == ("stop" if ends_by_stop else "length")
        assert frontend.counters.outcomes == {deltas[-1].finish_reason: 1}

    test()


def test_a_stop_string_ends_the_sequence_before_it_is_read(tokenizer):
    generation = text_generation(tokenizer, "a", ("cd",), max_tokens=20)

    @with_frontend()
    async def test(core, frontend):
        deltas = run_choices(frontend, "x", generation, tokenizer.decoder)
        first = asyncio.create_task(anext(deltas))
        await until(lambda: core.submitted)
        core.step()
        await first
        for _ in range(2):
            core.step()
        await until(lambda: not core.live)
        [(_, rest)] = [item async for item in deltas]
        assert (rest.text, rest.finish_reason) == ("", "stop")

    test()


@with_frontend()
async def test_a_slow_reader_delays_no_other_request(core, frontend):
    many = Generation(prompt=(1,), sampling=SamplingParams(max_tokens=50))
    slow = run_choices(frontend, "slow", many)
    first = asyncio.create_task(anext(slow))
    await until(lambda: core.submitted)
    core.step()
    await first
    quick = start(frontend, many, "quick")
    await until(lambda: len(core.submitted) == 2)
    for _ in range(50):
        core.step()
        await asyncio.sleep(0)
    assert sum(len(delta.token_ids) for delta in (await quick)[0]) == 50
    assert frontend.active == 0 and not frontend.idle.is_set()
    [(_, rest)] = [item async for item in slow]  # kept, and given out as one delta
    assert frontend.idle.is_set()
    assert rest.token_ids == tuple(token % MODEL.vocab_size for token in range(3, 52))
    assert rest == TokenDelta(core.submitted[0].id, rest.token_ids, finish_reason="length")
