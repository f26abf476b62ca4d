import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.config import MAX_LOGPROBS, MAX_STOP_IDS, EngineConfig
from gimbal_jax.serving.request import SamplingParams
from gimbal_jax.serving.validation import (
    MAX_REQUEST_ID,
    InvalidField,
    Unsupported,
    max_prompt_tokens,
    parse_generate,
    parse_priority,
)
from tests.serving.fake_server import CONFIG, MODEL

VOCAB = MODEL.vocab_size
LIMIT = 63  # max_model_len 64, one place left for a new token


def parse(prompt=(1, 2, 3), *, model=MODEL, config=CONFIG, encode=None, **fields):
    params = {name: fields.pop(name) for name in list(fields) if name in pb.SamplingParams.DESCRIPTOR.fields_by_name}
    if "text" not in fields:
        fields["tokenized"] = pb.TokenizedInput(input_ids=prompt)
    request = pb.GenerateRequest(sampling_params=pb.SamplingParams(**params), **fields)
    return parse_generate(request, model, config, encode, lambda: 12345)


def test_unset_fields_mean_vllm_defaults():
    parsed = parse()
    assert parsed.prompt == (1, 2, 3)
    assert parsed.engine is None
    assert parsed.sampling == SamplingParams(max_tokens=61, temperature=1.0, seed=12345, stop_token_ids=(299,))


def test_set_fields_are_taken():
    parsed = parse(
        data_parallel_rank=1,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1,
        n=1,
        max_tokens=5,
        min_tokens=2,
        stop_token_ids=[4, 299, 4],
        seed=0,
        logprobs=3,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
    )
    assert parsed.engine == 1
    assert parsed.sampling == SamplingParams(
        max_tokens=5,
        min_tokens=2,
        temperature=0.5,
        top_k=7,
        top_p=0.25,
        min_p=0.125,
        seed=0,
        logprobs=3,
        stop_token_ids=(299, 4),
    )


def test_edge_values_that_mean_something_simple():
    assert parse(temperature=0).sampling.temperature == 0
    assert parse(temperature=1e-7).sampling.temperature == 0
    assert parse(top_k=2**32 - 1).sampling.top_k == 0
    assert parse(max_tokens=10_000).sampling.max_tokens == 61
    assert parse(ignore_eos=True, stop_token_ids=[4]).sampling.stop_token_ids == (4,)
    assert parse(logprobs=0).sampling.logprobs == 0
    assert parse(prompt=[1] * LIMIT).sampling.max_tokens == 1


def test_small_page_pool_limits_the_prompt():
    config = dataclasses.replace(CONFIG, engine=EngineConfig(max_model_len=64, page_size=4, num_pages=3))
    assert max_prompt_tokens(config.engine) == 11
    assert len(parse(prompt=[1] * 11, config=config).prompt) == 11
    with pytest.raises(InvalidField, match=r"tokenized.input_ids must hold at most 11 tokens, got 12"):
        parse(prompt=[1] * 12, config=config)


def test_text_is_encoded_or_refused():
    assert parse(text="ab", encode=lambda text: [ord(char) for char in text]).prompt == (97, 98)
    with pytest.raises(InvalidField, match="text must hold at least one token"):
        parse(text="", encode=lambda text: [])
    with pytest.raises(InvalidField, match=r"text .* no tokenizer: send tokenized.input_ids"):
        parse(text="ab")


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("prompt", [], "tokenized.input_ids must hold at least one token"),
        ("prompt", [1] * 64, "tokenized.input_ids must hold at most 63 tokens, got 64"),
        ("prompt", [1, 300], r"tokenized.input_ids must hold token ids in \[0, 299\], got 300"),
        ("request_id", "x" * (MAX_REQUEST_ID + 1), "request_id must have at most 256 characters"),
        ("data_parallel_rank", 2, r"data_parallel_rank must be in \[0, 1\], got 2"),
        ("data_parallel_rank", -1, r"data_parallel_rank must be in \[0, 1\], got -1"),
        ("temperature", -0.5, "sampling_params.temperature must be finite and at least 0, got -0.5"),
        ("temperature", math.inf, "sampling_params.temperature must be finite"),
        ("temperature", math.nan, "sampling_params.temperature must be finite"),
        ("top_p", 1.5, r"sampling_params.top_p must be in \(0, 1\], got 1.5"),
        ("top_p", -0.5, "sampling_params.top_p"),
        ("top_p", math.nan, "sampling_params.top_p"),
        ("min_p", 1.5, r"sampling_params.min_p must be in \[0, 1\], got 1.5"),
        ("min_p", math.nan, "sampling_params.min_p"),
        ("max_tokens", 0, "sampling_params.max_tokens must be at least 1, got 0"),
        ("min_tokens", 62, r"sampling_params.min_tokens must be in \[0, 61\]"),
        ("logprobs", -1, rf"sampling_params.logprobs must be in \[0, {MAX_LOGPROBS}\], got -1"),
        ("logprobs", MAX_LOGPROBS + 1, "sampling_params.logprobs"),
        ("seed", -1, r"sampling_params.seed must be in \[0, 2147483647\], got -1"),
        ("stop_token_ids", [300], r"sampling_params.stop_token_ids must be in \[0, 299\], got 300"),
        ("stop_token_ids", list(range(MAX_STOP_IDS)), "sampling_params.stop_token_ids must be at most 16"),
    ],
)
def test_bad_values_name_field_and_range(field, value, text):
    with pytest.raises(InvalidField, match=text):
        parse(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("frequency_penalty", 0.5),
        ("presence_penalty", -0.5),
        ("repetition_penalty", 1.5),
        ("stop", ["x"]),
        ("n", 2),
        ("logit_bias", {1: 1.0}),
        ("prompt_logprobs", 0),
        ("truncate_prompt_tokens", 5),
        ("json_schema", "{}"),
        ("regex", "a"),
        ("grammar", "a"),
        ("structural_tag", "a"),
        ("json_object", True),
        ("choice", pb.ChoiceConstraint(choices=["a"])),
        ("mm_inputs", pb.MultimodalInputs()),
        ("extra_mm_inputs", [pb.MultimodalInputs()]),
        ("media_refs", pb.MediaRefs()),
        ("kv_transfer_params", pb.KvTransferParams()),
        ("kv_transfer_params_json", "{}"),
    ],
)
def test_what_is_not_done_is_refused_by_name(field, value):
    with pytest.raises(Unsupported, match=field):
        parse(**{field: value})


# Mostly good values, so that many requests pass all checks but one.
int32 = st.integers(0, 1000) | st.integers(-(2**31), 2**31 - 1)
uint32 = st.integers(0, 40) | st.integers(0, 310) | st.integers(0, 2**32 - 1)
token_ids = st.integers(0, VOCAB - 1) | st.integers(0, VOCAB) | st.integers(0, 2**32 - 1)
floats = st.floats(0, 1, width=32) | st.floats(width=32)


@given(
    prompt=st.lists(st.integers(0, VOCAB - 1), max_size=70) | st.lists(token_ids, max_size=70),
    data_parallel_rank=st.none() | st.integers(0, 1) | int32,
    temperature=st.none() | floats,
    top_p=floats,
    min_p=floats,
    top_k=uint32,
    max_tokens=st.none() | uint32,
    min_tokens=uint32,
    seed=st.none() | int32,
    logprobs=st.none() | st.integers(0, 20) | int32,
    stop_token_ids=st.lists(token_ids, max_size=20),
    ignore_eos=st.booleans(),
)
def test_any_request_is_refused_clearly_or_safe_to_run(**fields):
    try:
        parsed = parse(**fields)
    except InvalidField as error:
        assert " must " in str(error)
        return
    sampling = parsed.sampling
    assert 1 <= len(parsed.prompt) <= LIMIT
    assert all(0 <= token < VOCAB for token in (*parsed.prompt, *sampling.stop_token_ids))
    assert parsed.engine in (None, 0, 1)
    assert 1 <= sampling.max_tokens <= 64 - len(parsed.prompt)
    assert 0 <= sampling.min_tokens <= sampling.max_tokens
    assert sampling.temperature == 0 or 1e-5 <= sampling.temperature < math.inf
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert 0 <= sampling.top_k < VOCAB
    assert 0 <= sampling.seed < 2**32
    assert sampling.logprobs is None or 0 <= sampling.logprobs <= MAX_LOGPROBS
    assert len(sampling.stop_token_ids) <= MAX_STOP_IDS
    assert (299 in sampling.stop_token_ids) or fields["ignore_eos"]


@pytest.mark.parametrize(("value", "priority"), [("0", 0), ("-100", -100), ("100", 100), ("+7", 7), ("007", 7)])
def test_priority_is_an_integer_in_the_metadata(value, priority):
    metadata = [("user-agent", "grpc"), ("x-gimbal-priority", value)]
    assert parse_priority(metadata, "priority") == priority
    assert parse_priority([], "priority") == 0


@pytest.mark.parametrize("value", ["101", "-101", "1e9", "1.5", "", " 1", "high", "٣", "9" * 50])
def test_other_priorities_are_refused_by_name(value):
    with pytest.raises(InvalidField) as error:
        parse_priority([("x-gimbal-priority", value)], "priority")
    assert str(error.value) == f"x-gimbal-priority must be an integer in [-100, 100], got {value}"


def test_priority_is_refused_where_the_queue_would_not_heed_it():
    assert parse_priority([("x-gimbal-priority", "0")], "sjf_aging") == 0
    with pytest.raises(InvalidField, match="x-gimbal-priority must be 0 where the queue policy is not priority, got 1"):
        parse_priority([("x-gimbal-priority", "1")], "sjf_aging")
