"""Parsing of requests: every field of a GenerateRequest is used, rejected, or without effect; and priorities."""

import contextlib
import dataclasses
import math

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.config import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_STOP_IDS, EngineConfig
from gimbal_jax.exceptions import InvalidField, Unsupported
from gimbal_jax.serving.engine.prefix import page_hashes
from gimbal_jax.serving.engine.request import SamplingParams
from gimbal_jax.serving.rpc.parsing import (
    LONG_PROMPT,
    MAX_CHOICES,
    MAX_REQUEST_ID,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    Limits,
    is_slow,
    max_prompt_tokens,
    parse_generate,
    parse_priority,
)
from gimbal_jax.serving.text.grammar import Constraints
from gimbal_jax.serving.text.tokenizer import load_tokenizer
from tests.serving.fake_server import CONFIG, MODEL, write_model_folder

VOCAB = MODEL.vocab_size
LIMIT = 63  # max_model_len 64, one place left for a new token


class Tokens:
    """A tokenizer with a token for each character."""

    @staticmethod
    def surely_exceeds(text, tokens):
        return len(text) > 2 * tokens

    def encode(self, text):
        return [ord(char) for char in text]


class Compiler(Constraints):
    """Constraints that know one schema."""

    def __init__(self):
        pass

    def compile(self, params):
        if params.json_schema != "{}":
            raise InvalidField("sampling_params.json_schema must be a JSON schema")
        return object


def parse(prompt=(1, 2, 3), *, config=CONFIG, tokenizer=None, constraints=None, **fields):
    params = {name: fields.pop(name) for name in list(fields) if name in pb.SamplingParams.DESCRIPTOR.fields_by_name}
    if not {"text", "tokenized"} & {*fields}:
        fields["tokenized"] = pb.TokenizedInput(input_ids=prompt)
    request = pb.GenerateRequest(sampling_params=pb.SamplingParams(**params), **fields)
    return parse_generate(request, Limits(MODEL, config, tokenizer, constraints, lambda: 12345))


def test_unset_fields_mean_vllm_defaults():
    parsed = parse()
    assert parsed.prompt == (1, 2, 3)
    assert (parsed.engine, parsed.n, parsed.stops, parsed.new_grammar) == (None, 1, (), None)
    assert not parsed.include_stop and not parsed.skip_special_tokens
    assert parsed.sampling == SamplingParams(max_tokens=61, temperature=1.0, seed=12345, stop_token_ids=(299,))


def test_set_fields_replace_the_defaults():
    parsed = parse(
        data_parallel_rank=1,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        frequency_penalty=-2,
        presence_penalty=1.5,
        repetition_penalty=0.5,
        n=64,
        logit_bias={7: -100, 3: 0.5},
        prompt_logprobs=0,
        stop=["x", "yz", "x"],
        include_stop_str_in_output=True,
        tokenizer=Tokens(),
        max_tokens=5,
        min_tokens=2,
        stop_token_ids=[4, 299, 4],
        seed=0,
        logprobs=3,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
    )
    assert (parsed.engine, parsed.n, parsed.stops) == (1, 64, ("x", "yz"))
    assert parsed.include_stop and parsed.skip_special_tokens
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
        frequency_penalty=-2,
        presence_penalty=1.5,
        repetition_penalty=0.5,
        logit_bias=((3, 0.5), (7, -100)),
        prompt_logprobs=0,
    )


def test_extreme_values_are_clamped_to_equivalent_ones():
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


def test_text_is_encoded_or_rejected():
    assert parse(text="ab", tokenizer=Tokens()).prompt == (97, 98)
    with pytest.raises(InvalidField, match="text must hold at least one token"):
        parse(text="", tokenizer=Tokens())
    with pytest.raises(InvalidField, match=r"text .* no tokenizer: send tokenized.input_ids"):
        parse(text="ab")


def test_truncation_keeps_the_last_tokens():
    assert parse(truncate_prompt_tokens=2).prompt == (2, 3)
    assert parse(truncate_prompt_tokens=5).prompt == (1, 2, 3)
    assert parse(truncate_prompt_tokens=-1).prompt == (1, 2, 3)
    cut = parse(prompt=range(200), truncate_prompt_tokens=-1)
    assert (cut.prompt, cut.sampling.max_tokens) == (tuple(range(200 - LIMIT, 200)), 1)
    assert parse(text="x" * 1000 + "ab", tokenizer=Tokens(), truncate_prompt_tokens=2).prompt == (97, 98)
    assert parse(prompt=[10**9, 4], truncate_prompt_tokens=1).prompt == (4,)


def test_constraints_need_a_tokenizer():
    assert parse(json_schema="{}", constraints=Compiler()).new_grammar is object
    assert parse(constraints=Compiler()).new_grammar is None
    assert parse(json_schema="{}", grammar_from_first_token=True, constraints=Compiler()).new_grammar is object
    with pytest.raises(InvalidField, match="json_schema must be a JSON schema"):
        parse(json_schema="[", constraints=Compiler())
    for name, value in CONSTRAINTS.items():
        with pytest.raises(
            InvalidField, match=f"sampling_params.{name} must be unset, since the model has no tokenizer"
        ):
            parse(**{name: value})


def test_page_hashes_are_given_only_if_pages_may_be_shared():
    prompt, without = tuple(range(11)), dataclasses.replace(CONFIG.engine, prefix_cache=False)
    assert parse(prompt, n=2, temperature=1.0).page_hashes == page_hashes(prompt, 4)
    assert parse(prompt, truncate_prompt_tokens=5).page_hashes == page_hashes(prompt[-5:], 4)
    assert parse(prompt, prompt_logprobs=0).page_hashes == ()
    assert parse(prompt, config=dataclasses.replace(CONFIG, engine=without)).page_hashes == ()


def test_is_slow_for_text_constraints_and_long_prompts():
    params = pb.SamplingParams(n=2, stop=["a"])
    assert not is_slow(pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1]), sampling_params=params))
    assert not is_slow(pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1] * LONG_PROMPT)))
    assert is_slow(pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=[1] * (LONG_PROMPT + 1))))
    assert is_slow(pb.GenerateRequest(text="a"))
    assert is_slow(pb.GenerateRequest(sampling_params=pb.SamplingParams(regex="a")))


CONSTRAINTS = {
    "json_schema": "{}",
    "regex": "a",
    "grammar": "a",
    "structural_tag": "a",
    "json_object": True,
    "choice": pb.ChoiceConstraint(choices=["a"]),
}
REJECTED = {
    "mm_inputs": pb.MultimodalInputs(),
    "extra_mm_inputs": [pb.MultimodalInputs()],
    "media_refs": pb.MediaRefs(),
    "kv_transfer_params": pb.KvTransferParams(),
    "kv_transfer_params_json": "{}",
}
USED_BY_THE_SERVICE = {"request_id", "stream"}
WITHOUT_EFFECT = {"spaces_between_special_tokens", "grammar_from_first_token"}
"""The first is for tokenizers that we do not have; what the second asks for is always so."""
CHANGES_THE_GENERATION = {
    "tokenized": pb.TokenizedInput(input_ids=[9]),
    "text": "b",
    "data_parallel_rank": 1,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.5,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 0.5,
    "max_tokens": 5,
    "min_tokens": 5,
    "stop": ["a"],
    "stop_token_ids": [5],
    "skip_special_tokens": True,
    "ignore_eos": True,
    "n": 2,
    "logprobs": 1,
    "prompt_logprobs": 1,
    "seed": 5,
    "include_stop_str_in_output": True,
    "logit_bias": {1: 1.0},
    "truncate_prompt_tokens": 1,
    "json_schema": "{}",
}


def test_every_field_of_the_protocol_is_used_or_rejected():
    """A field that a later version of the protocol brings fails here."""
    fields = [*pb.GenerateRequest.DESCRIPTOR.fields, *pb.SamplingParams.DESCRIPTOR.fields]
    known = {*CONSTRAINTS, *REJECTED, *USED_BY_THE_SERVICE, *WITHOUT_EFFECT, *CHANGES_THE_GENERATION}
    assert {field.name for field in fields} - {"sampling_params"} == known

    plain = parse(tokenizer=Tokens(), constraints=Compiler())
    for name, value in CHANGES_THE_GENERATION.items():
        assert parse(**{name: value}, tokenizer=Tokens(), constraints=Compiler()) != plain, name
    for name, value in REJECTED.items():
        with pytest.raises(Unsupported, match=f"^{name} is not supported by this server"):
            parse(**{name: value})


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
        ("frequency_penalty", 2.5, r"sampling_params.frequency_penalty must be in \[-2, 2\], got 2.5"),
        ("frequency_penalty", math.nan, "sampling_params.frequency_penalty"),
        ("presence_penalty", -2.5, r"sampling_params.presence_penalty must be in \[-2, 2\], got -2.5"),
        ("presence_penalty", -math.inf, "sampling_params.presence_penalty"),
        ("repetition_penalty", -1, "sampling_params.repetition_penalty must be finite and above 0"),
        ("repetition_penalty", math.inf, "sampling_params.repetition_penalty"),
        ("repetition_penalty", math.nan, "sampling_params.repetition_penalty"),
        ("prompt_logprobs", -1, rf"sampling_params.prompt_logprobs must be in \[0, {MAX_LOGPROBS}\], got -1"),
        ("n", MAX_CHOICES + 1, r"sampling_params.n must be in \[1, 64\], got 65"),
        ("truncate_prompt_tokens", 0, r"sampling_params.truncate_prompt_tokens must be -1 .* or in \[1, 63\], got 0"),
        ("truncate_prompt_tokens", 64, "sampling_params.truncate_prompt_tokens"),
        ("truncate_prompt_tokens", -2, "sampling_params.truncate_prompt_tokens"),
        ("logit_bias", {300: 1.0}, r"sampling_params.logit_bias must hold token ids in \[0, 299\], got 300"),
        ("logit_bias", {-1: 1.0}, "sampling_params.logit_bias"),
        ("logit_bias", {1: 100.5}, r"sampling_params.logit_bias must hold values in \[-100, 100\], got 100.5"),
        ("logit_bias", {1: math.nan}, "sampling_params.logit_bias"),
        (
            "logit_bias",
            dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 0.0),
            "sampling_params.logit_bias must hold at most 300",
        ),
        ("stop", [""], f"sampling_params.stop must hold strings of 1 to {MAX_STOP_CHARACTERS} characters, got 0"),
        ("stop", ["a" * (MAX_STOP_CHARACTERS + 1)], "sampling_params.stop"),
        ("stop", [str(i) for i in range(MAX_STOP_STRINGS + 1)], "sampling_params.stop must hold at most 16 strings"),
        ("stop_token_ids", [300], r"sampling_params.stop_token_ids must be in \[0, 299\], got 300"),
        ("stop_token_ids", list(range(MAX_STOP_IDS)), "sampling_params.stop_token_ids must be at most 16"),
    ],
)
def test_bad_values_name_field_and_range(field, value, text):
    with pytest.raises(InvalidField, match=text):
        parse(**{field: value}, tokenizer=Tokens())


def test_stop_strings_need_a_tokenizer():
    with pytest.raises(InvalidField, match=r"sampling_params.stop .* no tokenizer: send stop_token_ids"):
        parse(stop=["a"])


def test_greedy_requests_have_one_choice():
    with pytest.raises(InvalidField, match=r"sampling_params.n must be 1 where temperature is 0, got 2"):
        parse(n=2, temperature=0)


@pytest.mark.parametrize(("value", "priority"), [("0", 0), ("-100", -100), ("100", 100), ("+7", 7), ("007", 7)])
def test_priority_comes_from_the_metadata(value, priority):
    metadata = [("user-agent", "grpc"), ("x-gimbal-priority", value)]
    assert parse_priority(metadata, "priority") == priority
    assert parse_priority([], "priority") == 0


@pytest.mark.parametrize("value", ["101", "-101", "1e9", "1.5", "", " 1", "high", "٣", "9" * 50])
def test_invalid_priorities_are_rejected(value):
    with pytest.raises(InvalidField) as error:
        parse_priority([("x-gimbal-priority", value)], "priority")
    assert str(error.value) == f"x-gimbal-priority must be an integer in [-100, 100], got {value}"


def test_priority_needs_the_queue_policy_priority():
    assert parse_priority([("x-gimbal-priority", "0")], "sjf_aging") == 0
    with pytest.raises(InvalidField, match="x-gimbal-priority must be 0 where the queue policy is not priority, got 1"):
        parse_priority([("x-gimbal-priority", "1")], "sjf_aging")


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
    frequency_penalty=floats,
    presence_penalty=floats,
    repetition_penalty=floats,
    max_tokens=st.none() | uint32,
    min_tokens=uint32,
    seed=st.none() | int32,
    n=st.integers(0, 2) | uint32,
    logprobs=st.none() | st.integers(0, 20) | int32,
    prompt_logprobs=st.none() | st.integers(0, 20) | int32,
    truncate_prompt_tokens=st.none() | int32,
    stop=st.lists(st.text(max_size=5), max_size=4),
    stop_token_ids=st.lists(token_ids, max_size=20),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1) | int32, floats, max_size=5),
    ignore_eos=st.booleans(),
)
def test_any_request_is_rejected_clearly_or_safe_to_run(**fields):
    try:
        parsed = parse(**fields, tokenizer=Tokens())
    except InvalidField as error:
        assert " must " in str(error)
        return
    sampling = parsed.sampling
    assert 1 <= len(parsed.prompt) <= LIMIT
    biased = [token for token, _ in sampling.logit_bias]
    assert all(0 <= token < VOCAB for token in (*parsed.prompt, *sampling.stop_token_ids, *biased))
    assert parsed.engine in (None, 0, 1)
    assert 1 <= sampling.max_tokens <= 64 - len(parsed.prompt)
    assert 0 <= sampling.min_tokens <= sampling.max_tokens
    assert sampling.temperature == 0 or 1e-5 <= sampling.temperature < math.inf
    assert 0 < sampling.top_p <= 1
    assert 0 <= sampling.min_p <= 1
    assert 0 <= sampling.top_k < VOCAB
    assert 0 <= sampling.seed < 2**32
    assert all(-2 <= penalty <= 2 for penalty in (sampling.frequency_penalty, sampling.presence_penalty))
    assert 0 < sampling.repetition_penalty < math.inf
    assert all(-100 <= bias <= 100 for _, bias in sampling.logit_bias)
    assert all(
        wanted is None or 0 <= wanted <= MAX_LOGPROBS for wanted in (sampling.logprobs, sampling.prompt_logprobs)
    )
    assert 1 <= parsed.n <= (MAX_CHOICES if sampling.temperature > 0 else 1)
    assert all(parsed.stops)
    assert len(sampling.stop_token_ids) <= MAX_STOP_IDS
    assert (299 in sampling.stop_token_ids) or fields["ignore_eos"]


def test_a_text_that_cannot_fit_is_rejected_before_it_is_tokenized():
    class Slow(Tokens):
        def encode(self, text):
            raise AssertionError("it would take seconds")

    with pytest.raises(InvalidField, match=f"text must hold at most {LIMIT} tokens, got 100000 characters"):
        parse(text="x" * 100_000, tokenizer=Slow())


@given(st.text(max_size=300))
def test_surely_exceeds_accepts_every_text_that_fits(tokenizer, text):
    assert not tokenizer.surely_exceeds(text, len(tokenizer.encode(text)))


@given(st.binary(max_size=200))
def test_any_message_is_parsed_or_rejected(tokenizer, data):
    try:
        request = pb.GenerateRequest.FromString(data)
    except DecodeError:
        return
    with contextlib.suppress(InvalidField, Unsupported):
        parse_generate(request, Limits(MODEL, CONFIG, tokenizer, Compiler(), lambda: 1))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_model_folder(tmp_path_factory.mktemp("model")))
