import dataclasses

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import MAX_LOGIT_BIAS, MAX_STOP_IDS, EngineConfig
from gimbal_jax.model.inputs import Logprobs, PackedInputs, StepInputs, StepOutputs, empty_inputs, step_shape, unpack
from gimbal_jax.model.step import _forward_inputs
from gimbal_jax.serving.engine.plan import NOT_FINITE, ON_DEVICE, Adjustment, Chunk, Plan
from gimbal_jax.serving.engine.request import SamplingParams, TokenLogprobs
from gimbal_jax.serving.runtime.batch import bucket_for, default_rare_inputs, pack_step, step_buckets, unpack_results
from tests.serving.runtime.plans import decode_rows, plan_of

CONFIG = EngineConfig(max_model_len=12, page_size=4, num_pages=10, max_rows=4, token_budget=16, tile=4)
VOCAB = 80
PAD = 10 * 4
"""Where padding "writes": past the last page."""
GREEDY = SamplingParams(max_tokens=9, temperature=0.0)
SAMPLED = SamplingParams(
    max_tokens=9, min_tokens=3, temperature=0.5, top_k=8, top_p=0.25, min_p=0.125, seed=2**32 + 7, stop_token_ids=(1, 2)
)
DEFAULTS = default_rare_inputs(CONFIG, VOCAB, 2)


def chunk(tokens, start, pages, sampling=None, row=0, **more) -> Chunk:
    return Chunk(row, np.array(tokens, np.int32), start, np.array(pages, np.int32), sampling, **more)


def plan(decode=(), prefill=(), adjustments=()) -> Plan:
    """``decode``: (row, token, start, pages, sampling) of each."""
    return plan_of(decode_rows(decode, CONFIG.pages_per_row, adjustments), prefill, tile=CONFIG.tile)


MIXED = plan(
    decode=[(2, 50, 5, [7, 3], GREEDY)],
    prefill=[
        chunk([61, 62, 63, 64, 65, 66], 2, [4, 8, 9], None, row=1),  # two tiles, and more to come
        chunk([71, 72, 73], 0, [5], SAMPLED, row=3),
    ],
)


def laid_out(plans, rows, tiles, chosen_SR=None) -> tuple[StepInputs, PackedInputs]:
    """What the devices make of the plans."""
    shape = step_shape(CONFIG, (rows, tiles))
    packed_SX, _ = pack_step(plans, shape, DEFAULTS)
    if chosen_SR is None:
        chosen_SR = np.zeros((len(plans), CONFIG.max_rows), np.int32)
    found = _forward_inputs(shape, CONFIG.num_pages, CONFIG.page_size, jax.numpy.asarray(packed_SX), chosen_SR)
    return jax.tree.map(np.asarray, found)


def test_two_engines_one_idle_by_hand():
    step, packed = laid_out([plan(), MIXED], 2, 3)
    assert step.tokens_ST[1].tolist() == [50, 0, 61, 62, 63, 64, 65, 66, 0, 0, 71, 72, 73, 0]
    assert step.positions_ST[1].tolist() == [5, 0, 2, 3, 4, 5, 6, 7, 0, 0, 0, 1, 2, 0]
    assert step.write_ST[1].tolist() == [
        *(3 * 4 + 1, PAD),
        *(4 * 4 + 2, 4 * 4 + 3, 8 * 4, 8 * 4 + 1),
        *(8 * 4 + 2, 8 * 4 + 3, PAD, PAD),
        *(5 * 4, 5 * 4 + 1, 5 * 4 + 2, PAD),
    ]
    assert step.start_SG[1].tolist() == [5, 0, 2, 6, 0]
    assert step.count_SG[1].tolist() == [1, 0, 4, 2, 3]
    assert step.page_table_SGM[1][[0, 2, 3, 4]].tolist() == [[7, 3, 0], [4, 8, 9], [4, 8, 9], [5, 0, 0]]

    # The decode row, the two prompts and a place that nobody has.
    sampling = packed.sampling
    assert packed.row_SC[1].tolist() == [2, 4, 3, 4]
    assert packed.last_SC[1].tolist() == [0, 7, 12, 0]
    assert sampling.temperature_SC[1].tolist() == [0, 0, 0.5, 0]
    assert sampling.top_k_SC[1].tolist() == [0, 0, 8, 0]
    assert sampling.top_p_SC[1][2] == 0.25
    assert sampling.min_p_SC[1].tolist() == [0, 0, 0.125, 0]
    assert sampling.seed_SC[1].tolist() == [0, 0, 7, 0]
    assert sampling.logprobs_SC[1].tolist() == [-1] * 4

    # The idle engine: same shapes, nothing but padding.
    assert (step.write_ST[0] == PAD).all()
    for idle in (step.tokens_ST, step.positions_ST, step.start_SG, step.count_SG, step.page_table_SGM):
        assert not idle[0].any()
    assert (packed.row_SC[0] == CONFIG.max_rows).all()


def test_unknown_tokens_are_taken_from_the_devices():
    """Also after logits that were no numbers (-1): any token does, but no index that reaches from the end."""
    decode = [(3, ON_DEVICE, 5, [7, 3], GREEDY), (0, 9, 1, [2], GREEDY), (1, ON_DEVICE, 2, [4], GREEDY)]
    chosen_SR = np.array([[10, 11, 12, 13], [20, NOT_FINITE, 22, 23]], np.int32)
    step, _ = laid_out([plan(decode), plan(decode[::-1])], 4, 1, chosen_SR)
    assert step.tokens_ST.tolist() == [[13, 9, 11, 0, 0, 0, 0, 0], [0, 9, 23, 0, 0, 0, 0, 0]]


ASKING = dataclasses.replace(
    GREEDY, logit_bias=((3, 2.5), (7, -1.0)), repetition_penalty=1.5, frequency_penalty=0.5, presence_penalty=0.25
)


def test_rare_inputs_stand_in_their_row_and_others_keep_the_defaults():
    penalised = Adjustment(history=np.arange(10, 15, dtype=np.int32), prompt_tokens=4, params=ASKING)
    masked = Adjustment(allowed=np.array([5, -1, 1], np.int32))
    early = Adjustment(suppress=(1, 2))
    mine = plan(
        [(1, 52, 3, [2], SAMPLED), (0, 50, 5, [7, 3], ASKING), (3, 51, 2, [6], GREEDY)],
        [chunk([71, 72, 73, 74, 75], 0, [5, 1], SAMPLED, row=2, adjustment=early)],
        [(1, penalised), (2, masked)],
    )
    shape = step_shape(CONFIG, (4, 4))
    _, rare = pack_step([plan(), mine], shape, DEFAULTS)
    assert rare.suppress_SRK[1, 2].tolist() == [1, 2] + [-1] * (MAX_STOP_IDS - 2)
    assert rare.bias_ids_SRK[1, 0].tolist() == [3, 7] + [-1] * (MAX_LOGIT_BIAS - 2)
    assert rare.bias_SRK[1, 0].tolist() == [2.5, -1.0] + [0] * (MAX_LOGIT_BIAS - 2)
    assert rare.allowed_SRW[1].tolist() == [[-1] * 3, [-1] * 3, [-1] * 3, [5, -1, 1]]
    assert rare.history_SRN[1, 0].tolist() == [10, 11, 12, 13, 14] + [0] * (CONFIG.max_model_len - 5)
    assert rare.prompt_tokens_SR[1].tolist() == [4, 0, 0, 0]
    assert rare.repetition_SR[1].tolist() == [1.5, 1, 1, 1]
    assert rare.frequency_SR[1].tolist() == [0.5, 0, 0, 0]
    assert rare.presence_SR[1].tolist() == [0.25, 0, 0, 0]
    assert (bool(rare.adjusts), bool(rare.penalises), bool(rare.want_targets)) == (True, True, False)
    assert rare.targets_ST is DEFAULTS.targets_ST
    for name, array in vars(rare).items():
        unasked = getattr(DEFAULTS, name)
        assert (array.shape, array.dtype) == (unasked.shape, unasked.dtype), name
        np.testing.assert_array_equal(array[:1] if array.ndim else False, unasked[:1] if array.ndim else unasked)

    # One thing alone leaves all the others on the devices.
    _, rare = pack_step(
        [plan([(3, 51, 2, [6], GREEDY)], adjustments=[(0, masked)])], step_shape(CONFIG, (1, 0)), DEFAULTS
    )
    fresh = {name for name, array in vars(rare).items() if array is not getattr(DEFAULTS, name)}
    assert fresh == {"adjusts", "allowed_SRW"}
    assert pack_step([plan([(1, 52, 3, [2], SAMPLED)])], step_shape(CONFIG, (1, 0)), DEFAULTS)[1] is DEFAULTS


def test_targets_stand_at_the_places_of_their_tokens():
    first = chunk([61, 62, 63, 64, 65], 0, [4, 8], targets=np.array([62, 63, 64, 65, 66], np.int32))
    second = chunk([71, 72, 73], 0, [5], SAMPLED, row=1, targets=np.array([72, 73], np.int32))
    _, rare = pack_step([plan(), plan(prefill=[first, second])], step_shape(CONFIG, (2, 3)), DEFAULTS)
    assert rare.targets_ST.tolist() == [[0] * 16, [62, 63, 64, 65, 66, 0, 0, 0, 72, 73, 0, 0, 0, 0, 0, 0]]
    assert bool(rare.want_targets)


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 3))
def test_host_and_devices_unpack_the_same_inputs(rows, tiles, engines):
    """Each part has places of its own, all are used, and types keep their bits."""
    shape = step_shape(CONFIG, (rows, tiles))
    packed_SX = empty_inputs(engines, shape)
    parts = unpack(packed_SX, shape)
    size = sum(part.size for part in jax.tree.leaves(parts))
    assert size == packed_SX.size
    random = np.random.default_rng(0)
    for part in jax.tree.leaves(parts):
        floats = part.dtype == np.float32
        part[...] = random.normal(size=part.shape) if floats else random.integers(2**31, size=part.shape)
    of_devices = unpack(jax.numpy.asarray(packed_SX), shape)
    for ours, theirs in zip(jax.tree.leaves(parts), jax.tree.leaves(of_devices), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("sampling", "wanted"),
    [(None, False), (GREEDY, False), (dataclasses.replace(GREEDY, logprobs=0), True)],
)
def test_log_probabilities_are_fetched_only_if_wanted(sampling, wanted):
    assert bool(plan(prefill=[chunk([1], 0, [0], sampling)]).logprobs) == wanted
    assert bool(plan([(0, 1, 0, [0], sampling or GREEDY)]).logprobs) == wanted


def outputs_by_number() -> StepOutputs:
    """Each sequence's outputs, and each tile place's, carry its number, so that a wrong one shows."""
    sequences, places = np.arange(2 * 4).reshape(2, 4), np.arange(2 * 12).reshape(2, 12)

    def logprobs(numbers: np.ndarray) -> Logprobs:
        top = numbers[:, :, None] * 100 + np.arange(4)
        return Logprobs(-numbers / 2, top, -top.astype(float))

    return StepOutputs(sequences, logprobs(sequences), logprobs(places))


SHAPE = step_shape(CONFIG, (2, 3))


def test_results_map_back_to_rows_and_chunks():
    first, last = MIXED.prefill
    wanting = dataclasses.replace(last, sampling=dataclasses.replace(SAMPLED, logprobs=2))
    decode = decode_rows([(2, 50, 5, [7, 3], dataclasses.replace(GREEDY, logprobs=1))], CONFIG.pages_per_row)
    result = unpack_results(outputs_by_number(), plan_of(decode, (first, wanting), tile=CONFIG.tile), 1, SHAPE)
    assert result.token_D.tolist() == [4]
    assert result.token_C.tolist() == [5, 6]
    assert result.logprobs == {
        2: TokenLogprobs(-2.0, (400,), (-400.0,)),
        3: TokenLogprobs(-3.0, (600, 601), (-600.0, -601.0)),
    }
    assert result.prompt_logprobs == {}
    idle = unpack_results(outputs_by_number(), plan(), 0, SHAPE)
    assert (len(idle.token_D), len(idle.token_C), idle.logprobs) == (0, 0, {})


def test_log_probabilities_of_prompts_map_back_to_their_targets():
    """The second chunk begins in the third tile: place 8 of 12 of the second engine, number 20."""
    first, last = MIXED.prefill
    first = dataclasses.replace(first, targets=np.arange(6, dtype=np.int32), target_logprobs=1)
    last = dataclasses.replace(last, targets=np.arange(2, dtype=np.int32), target_logprobs=0)
    result = unpack_results(outputs_by_number(), plan_of(MIXED.decode, (first, last), tile=CONFIG.tile), 1, SHAPE)
    of_first = tuple(TokenLogprobs(-n / 2, (n * 100,), (-n * 100.0,)) for n in range(12, 18))
    of_last = tuple(TokenLogprobs(-n / 2, (), ()) for n in range(20, 22))
    assert result.prompt_logprobs == {1: of_first, 3: of_last}


def test_logits_that_are_not_finite_give_their_sequence_no_log_probabilities():
    outputs = outputs_by_number()
    outputs.token_SC[1, 2] = NOT_FINITE
    first, last = MIXED.prefill
    last = dataclasses.replace(last, sampling=dataclasses.replace(SAMPLED, logprobs=2), targets=np.arange(2))
    first = dataclasses.replace(first, targets=np.arange(6, dtype=np.int32))
    result = unpack_results(outputs, plan_of(MIXED.decode, (first, last), tile=CONFIG.tile), 1, SHAPE)
    assert result.token_C.tolist() == [5, NOT_FINITE]
    assert result.logprobs == {}
    assert list(result.prompt_logprobs) == [1]


def test_buckets_by_hand():
    config = EngineConfig(max_rows=30, token_budget=512, tile=32)
    assert step_buckets(config, tp=1) == ((4, 0), (8, 0), (15, 0), (30, 0), (8, 4), (30, 4), (30, 16))
    assert step_buckets(config, tp=4) == ((4, 0), (8, 0), (16, 0), (32, 0), (8, 4), (32, 4), (32, 16))
    assert step_buckets(EngineConfig(max_rows=1, token_budget=32, tile=32), tp=2) == ((2, 0), (2, 1))


def test_a_tile_that_tp_does_not_divide_is_rejected():
    with pytest.raises(ValueError, match="tile must be a multiple of tp: tile 30, tp 4"):
        step_buckets(EngineConfig(tile=30), tp=4)


def test_the_smallest_bucket_that_fits_every_engine():
    buckets = ((1, 0), (4, 0), (1, 1), (4, 1), (1, 4), (4, 4))
    one, three = plan([(0, 1, 0, [0], GREEDY)]), plan([(row, 1, 0, [row], GREEDY) for row in range(3)])
    tiles = plan(prefill=[chunk([1] * 5, 0, [0, 1])])
    assert bucket_for([one, plan()], buckets) == (1, 0)
    assert bucket_for([one, three], buckets) == (4, 0)
    assert bucket_for([one, tiles], buckets) == (1, 4)
    assert bucket_for([three, tiles], buckets) == (4, 4)
    assert bucket_for([plan(), plan()], buckets) == (1, 0)


@st.composite
def plans(draw) -> Plan:
    """Any plan that an engine of CONFIG may make; rows and pages of its sequences differ."""
    free = list(draw(st.permutations(range(CONFIG.num_pages))))
    tiles = draw(st.integers(0, 4))
    decode, prefill = [], []
    for row in draw(st.permutations(range(CONFIG.max_rows)))[: draw(st.integers(0, 3))]:
        most = min(4 * tiles, CONFIG.max_model_len)
        prefills = bool(most) and draw(st.booleans())
        count = draw(st.integers(1, most)) if prefills else 1
        start = draw(st.integers(0, CONFIG.max_model_len - count))
        pages = [free.pop() for _ in range(-(-(start + count) // 4))]
        tokens = draw(st.lists(st.integers(1, 99), min_size=count, max_size=count))
        if prefills:
            tiles -= -(-count // 4)
            prefill.append(chunk(tokens, start, pages, draw(st.sampled_from([None, GREEDY, SAMPLED])), row=row))
        else:
            decode.append((row, tokens[0], start, pages, draw(st.sampled_from([GREEDY, SAMPLED]))))
    return plan(decode, prefill)


def places_of(mine: Plan) -> dict[int, tuple[int, int]]:
    """Where each token belongs, straight from the plan: (token, position) by KV place."""
    decode = mine.decode
    chunks = [*zip(decode.token_D[:, None], decode.start_D.tolist(), decode.page_table_DM, strict=True)]
    chunks += [(chunk.tokens, chunk.start, chunk.pages) for chunk in mine.prefill]
    return {
        int(pages[at // 4]) * 4 + at % 4: (int(token), at)
        for tokens, start, pages in chunks
        for at, token in enumerate(tokens, start)
    }


@given(st.lists(plans(), min_size=1, max_size=3), st.sampled_from([1, 2, 4]))
def test_every_token_is_written_once_and_padding_never(several, tp):
    rows, tiles = bucket_for(several, step_buckets(CONFIG, tp))
    step, packed = laid_out(several, rows, tiles)
    assert step.tokens_ST.shape[1] % tp == 0
    for s, mine in enumerate(several):
        expected = places_of(mine)
        written = [
            (place, (token, at))
            for place, token, at in zip(
                step.write_ST[s].tolist(), step.tokens_ST[s].tolist(), step.positions_ST[s].tolist(), strict=True
            )
            if place != PAD
        ]
        assert len(written) == len(expected) == mine.tokens == step.count_SG[s].sum()
        assert dict(written) == expected
        # Who chooses a token does so after its own last one, in a row of its own.
        ends = {
            row: (token, start)
            for row, token, start in zip(mine.decode.row_D, mine.decode.token_D, mine.decode.start_D, strict=True)
        }
        ends |= {
            chunk.row: (chunk.tokens[-1], chunk.start + len(chunk.tokens) - 1)
            for chunk in mine.prefill
            if chunk.sampling is not None
        }
        found = {
            row: (step.tokens_ST[s, last], step.positions_ST[s, last])
            for row, last in zip(packed.row_SC[s], packed.last_SC[s], strict=True)
            if row < CONFIG.max_rows
        }
        assert found == ends
