import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import MAX_LOGIT_BIAS, MAX_STOP_IDS, EngineConfig
from gimbal_jax.model.inputs import Logprobs, StepOutputs
from gimbal_jax.serving.batch import blank, bucket_for, results_of, stack, step_buckets
from gimbal_jax.serving.plan import Chunk, NextToken, Plan
from gimbal_jax.serving.request import SamplingParams, TokenLogprobs

CONFIG = EngineConfig(max_model_len=12, page_size=4, num_pages=10, max_rows=4, token_budget=16, tile=4)
VOCAB = 80
PAD = 10 * 4
"""Where padding "writes": past the last page."""
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)


def chunk(tokens, start, pages, sampling=None, suppress=(), name="a") -> Chunk:
    return Chunk(name, np.array(tokens, np.int32), start, np.array(pages, np.int32), sampling, suppress)


def plan(decode=(), prefill=()) -> Plan:
    return Plan(tuple(decode), tuple(prefill), sum(-(-len(c.tokens) // CONFIG.tile) for c in prefill))


SAMPLED = SamplingParams(
    max_tokens=9, min_tokens=3, temperature=0.5, top_k=8, top_p=0.25, min_p=0.125, seed=2**32 + 7, stop_token_ids=(1, 2)
)
MIXED = plan(
    decode=[chunk([50], 5, [7, 3], GREEDY)],
    prefill=[
        chunk([61, 62, 63, 64, 65, 66], 2, [4, 8, 9], None),  # two tiles, and more to come
        chunk([71, 72, 73], 0, [5], SAMPLED, suppress=(1, 2)),
    ],
)


BLANK = blank(CONFIG, VOCAB, 2)


def test_two_engines_one_idle_by_hand():
    step = stack([Plan(), MIXED], CONFIG, 2, 3, BLANK)
    _, tokens = step.tokens_ST
    assert tokens.tolist() == [50, 0, 61, 62, 63, 64, 65, 66, 0, 0, 71, 72, 73, 0]
    assert step.positions_ST[1].tolist() == [5, 0, 2, 3, 4, 5, 6, 7, 0, 0, 0, 1, 2, 0]
    assert step.write_ST[1].tolist() == [
        *(3 * 4 + 1, PAD),
        *(4 * 4 + 2, 4 * 4 + 3, 8 * 4, 8 * 4 + 1),
        *(8 * 4 + 2, 8 * 4 + 3, PAD, PAD),
        *(5 * 4, 5 * 4 + 1, 5 * 4 + 2, PAD),
    ]
    assert step.start_SG[1].tolist() == [5, 0, 2, 6, 0]
    assert step.count_SG[1].tolist() == [1, 0, 4, 2, 3]
    assert step.page_table_SGM[1].tolist() == [[7, 3, 0], [0, 0, 0], [4, 8, 9], [4, 8, 9], [5, 0, 0]]

    sampling = step.sampling
    assert sampling.temperature_SG[1].tolist() == [0, 0, 0, 0, 0.5]
    assert sampling.top_k_SG[1].tolist() == [0, 0, 0, 0, 8]
    assert sampling.top_p_SG[1].tolist() == [1, 1, 1, 1, 0.25]
    assert sampling.min_p_SG[1].tolist() == [0, 0, 0, 0, 0.125]
    assert sampling.seed_SG[1].tolist() == [0, 0, 0, 0, 7]
    assert not sampling.plain
    assert not sampling.want_logprobs

    # The idle engine: same shapes, nothing but padding.
    assert (step.write_ST[0] == PAD).all()
    for idle in (step.tokens_ST, step.positions_ST, step.start_SG, step.count_SG, step.page_table_SGM):
        assert not idle[0].any()
    assert (step.rare.group_SC[0] == -1).all()


ASKING = dataclasses.replace(
    GREEDY, logit_bias=((3, 2.5), (7, -1.0)), repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25
)


def test_what_is_asked_for_has_a_row_and_the_rest_is_passed_on():
    penalised = chunk([50], 5, [7, 3], ASKING)
    penalised.history, penalised.prompt_tokens = np.arange(10, 16, dtype=np.int32), 4
    masked = chunk([51], 2, [6], GREEDY)
    masked.allowed = np.array([5, -1, 1], np.int32)
    nothing = chunk([52], 3, [2], SAMPLED)
    early = chunk([71, 72, 73, 74, 75], 0, [5, 1], SAMPLED, suppress=(1, 2))
    mine = plan(decode=[nothing, penalised, masked], prefill=[early])
    rare = stack([Plan(), mine], CONFIG, 4, 4, BLANK).rare
    assert rare.group_SC.tolist() == [[-1] * 4, [1, 2, 5, -1]]
    assert rare.suppress_SCK[1, 2].tolist() == [1, 2] + [-1] * (MAX_STOP_IDS - 2)
    assert rare.bias_ids_SCK[1, 0].tolist() == [3, 7] + [-1] * (MAX_LOGIT_BIAS - 2)
    assert rare.bias_SCK[1, 0].tolist() == [2.5, -1.0] + [0] * (MAX_LOGIT_BIAS - 2)
    assert rare.allowed_SCW[1].tolist() == [[-1] * 3, [5, -1, 1], [-1] * 3, [-1] * 3]
    assert rare.history_SCN[1, 0].tolist() == [10, 11, 12, 13, 14, 15] + [0] * (CONFIG.max_model_len - 6)
    assert rare.prompt_tokens_SC[1].tolist() == [4, 0, 0, 0]
    assert rare.repetition_SC[1].tolist() == [1.5, 1, 1, 1]
    assert rare.frequency_SC[1].tolist() == [0.5, 0, 0, 0]
    assert rare.presence_SC[1].tolist() == [0.25, 0, 0, 0]
    assert (bool(rare.adjusts), bool(rare.penalises), bool(rare.want_targets)) == (True, True, False)
    assert rare.targets_ST is BLANK.targets_ST
    for name, array in vars(rare).items():
        unasked = getattr(BLANK, name)
        assert (array.shape, array.dtype) == (unasked.shape, unasked.dtype), name
        np.testing.assert_array_equal(array[:1] if array.ndim else False, unasked[:1] if array.ndim else unasked)

    # One thing alone leaves all the others on the devices.
    rare = stack([plan(decode=[masked])], CONFIG, 1, 0, BLANK).rare
    fresh = {name for name, array in vars(rare).items() if array is not getattr(BLANK, name)}
    assert fresh == {"adjusts", "group_SC", "allowed_SCW"}
    rare = stack([plan(decode=[nothing])], CONFIG, 1, 0, BLANK).rare
    assert all(array is getattr(BLANK, name) for name, array in vars(rare).items())


def test_targets_stand_at_the_places_of_their_tokens():
    first, second = chunk([61, 62, 63, 64, 65], 0, [4, 8]), chunk([71, 72, 73], 0, [5], SAMPLED)
    first.targets, second.targets = np.array([62, 63, 64, 65, 66], np.int32), np.array([72, 73], np.int32)
    rare = stack([Plan(), plan(prefill=[first, second])], CONFIG, 2, 3, BLANK).rare
    assert rare.targets_ST.tolist() == [[0] * 16, [62, 63, 64, 65, 66, 0, 0, 0, 72, 73, 0, 0, 0, 0, 0, 0]]
    assert bool(rare.want_targets)


def test_array_types():
    step = stack([MIXED], CONFIG, 2, 3, BLANK)
    for name in ("tokens_ST", "positions_ST", "write_ST", "page_table_SGM", "start_SG", "count_SG"):
        assert getattr(step, name).dtype == np.int32, name
    floats = {"temperature_SG", "top_p_SG", "min_p_SG"}
    kinds = {field.name: getattr(step.sampling, field.name).dtype for field in dataclasses.fields(step.sampling)}
    assert {name for name, kind in kinds.items() if kind == np.float32} == floats
    assert (kinds["seed_SG"], kinds["top_k_SG"]) == (np.uint32, np.int32)
    assert (kinds["plain"], kinds["want_logprobs"]) == (np.bool_, np.bool_)


@pytest.mark.parametrize(
    ("sampling", "suppress", "plain", "want_logprobs"),
    [
        (None, (), True, False),
        (GREEDY, (), True, False),
        (GREEDY, (3,), False, False),
        (dataclasses.replace(GREEDY, temperature=0.1), (), False, False),
        (dataclasses.replace(GREEDY, logit_bias=((1, 1.0),)), (), False, False),
        (dataclasses.replace(GREEDY, logprobs=0), (), True, True),
    ],
)
def test_flags_of_the_whole_step(sampling, suppress, plain, want_logprobs):
    other = Plan(decode=(chunk([1], 0, [0], GREEDY),))
    mine = Plan(prefill=(chunk([1], 0, [0], sampling, suppress),), tiles=1)
    flags = stack([other, mine], CONFIG, 2, 1, BLANK).sampling
    assert (bool(flags.plain), bool(flags.want_logprobs)) == (plain, want_logprobs)


def outputs_by_number() -> StepOutputs:
    """Each group's outputs, and each tile place's, carry its number, so that a wrong one shows."""
    groups, places = np.arange(2 * 5).reshape(2, 5), np.arange(2 * 12).reshape(2, 12)

    def logprobs(numbers: np.ndarray) -> Logprobs:
        top = numbers[:, :, None] * 100 + np.arange(4)
        return Logprobs(-numbers / 2, top, -top.astype(float))

    return StepOutputs(groups, np.ones((2, 5), bool), logprobs(groups), logprobs(places))


def test_results_map_back_to_chunks():
    outputs = outputs_by_number()
    decode, first, last = MIXED.chunks
    wanting = dataclasses.replace(last, sampling=dataclasses.replace(SAMPLED, logprobs=2))
    results = results_of(outputs, Plan((decode,), (first, wanting), 3), 1, CONFIG, decode_rows=2)
    assert results == [NextToken(5), None, NextToken(9, TokenLogprobs(-4.5, (900, 901), (-900.0, -901.0)))]
    assert results_of(outputs, Plan(), 0, CONFIG, decode_rows=2) == []


def test_log_probabilities_of_prompts_map_back_to_their_targets():
    """The second chunk begins in the third tile: place 8 of 12 of the second engine, number 20."""
    decode, first, last = MIXED.chunks
    first = dataclasses.replace(first, targets=np.arange(6, dtype=np.int32), target_logprobs=1)
    last = dataclasses.replace(last, targets=np.arange(2, dtype=np.int32), target_logprobs=0)
    results = results_of(outputs_by_number(), Plan((decode,), (first, last), 3), 1, CONFIG, decode_rows=2)
    of_first = tuple(TokenLogprobs(-n / 2, (n * 100,), (-n * 100.0,)) for n in range(12, 18))
    of_last = tuple(TokenLogprobs(-n / 2, (), ()) for n in range(20, 22))
    assert results == [NextToken(5), NextToken(None, prompt_logprobs=of_first), NextToken(9, prompt_logprobs=of_last)]


def test_logits_that_are_not_finite_are_an_error_of_their_chunk_alone():
    outputs = outputs_by_number()
    outputs.finite_SG[1, [1, 3]] = False  # a group that nobody has, and the last one of the first prefill chunk
    results = results_of(outputs, MIXED, 1, CONFIG, decode_rows=2)
    assert results == [NextToken(5), NextToken(None, error="its logits are not finite"), NextToken(9)]


def test_buckets_by_hand():
    config = EngineConfig(max_rows=30, token_budget=512, tile=32)
    assert step_buckets(config, tp=1) == ((8, 0), (30, 0), (8, 4), (30, 4), (8, 16), (30, 16))
    assert step_buckets(config, tp=4) == ((8, 0), (32, 0), (8, 4), (32, 4), (8, 16), (32, 16))
    assert step_buckets(EngineConfig(max_rows=1, token_budget=32, tile=32), tp=2) == ((2, 0), (2, 1))


def test_a_tile_that_tp_does_not_divide_is_refused():
    with pytest.raises(ValueError, match="tile must be a multiple of tp: tile 30, tp 4"):
        step_buckets(EngineConfig(tile=30), tp=4)


def test_the_smallest_bucket_that_fits_every_engine():
    buckets = ((1, 0), (4, 0), (1, 1), (4, 1), (1, 4), (4, 4))
    decode = chunk([1], 0, [0], GREEDY)
    one, three, tiles = Plan((decode,)), Plan((decode,) * 3), Plan(prefill=(chunk([1] * 5, 0, [0, 1]),), tiles=2)
    assert bucket_for([one, Plan()], buckets) == (1, 0)
    assert bucket_for([one, three], buckets) == (4, 0)
    assert bucket_for([one, tiles], buckets) == (1, 4)
    assert bucket_for([three, tiles], buckets) == (4, 4)
    assert bucket_for([Plan(), Plan()], buckets) == (1, 0)


@st.composite
def plans(draw) -> Plan:
    """Any plan that an engine of CONFIG may make; the pages of its sequences differ."""
    free = list(draw(st.permutations(range(CONFIG.num_pages))))
    tiles = draw(st.integers(0, 4))
    chunks: tuple[list[Chunk], list[Chunk]] = ([], [])
    for row in range(draw(st.integers(0, 3))):
        most = min(4 * tiles, CONFIG.max_model_len)
        if kind := draw(st.integers(0, 1)) if most else 0:
            count = draw(st.integers(1, most))
            tiles -= -(-count // 4)
        else:
            count = 1
        start = draw(st.integers(0, CONFIG.max_model_len - count))
        pages = [free.pop() for _ in range(-(-(start + count) // 4))]
        tokens = draw(st.lists(st.integers(1, 99), min_size=count, max_size=count))
        chunks[kind].append(chunk(tokens, start, pages, draw(st.sampled_from([None, GREEDY, SAMPLED])), name=str(row)))
    return plan(*chunks)


@given(st.lists(plans(), min_size=1, max_size=3), st.sampled_from([1, 2, 4]))
def test_every_token_is_written_once_in_its_place_and_padding_never(several, tp):
    buckets = step_buckets(CONFIG, tp)
    rows, tiles = bucket_for(several, buckets)
    step = stack(several, CONFIG, rows, tiles, BLANK)
    assert step.tokens_ST.shape[1] % tp == 0
    for s, mine in enumerate(several):
        expected = {
            int(c.pages[at // 4]) * 4 + at % 4: (int(token), at)
            for c in mine.chunks
            for at, token in enumerate(c.tokens, c.start)
        }
        written = [
            (place, (token, at))
            for place, token, at in zip(
                step.write_ST[s].tolist(), step.tokens_ST[s].tolist(), step.positions_ST[s].tolist(), strict=True
            )
            if place != PAD
        ]
        assert len(written) == len(expected) == mine.tokens == step.count_SG[s].sum()
        assert dict(written) == expected
