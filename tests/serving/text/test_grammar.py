import json
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import llguidance
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gimbal_jax.exceptions import InvalidField, Unsupported
from gimbal_jax.serving.text import grammar
from gimbal_jax.serving.text.grammar import MAX_GRAMMAR_BYTES, Constraints

WORDS = [
    '{"name": "',
    '", "age": ',
    '"}',
    "colour blue green red 世界 🙂 [1, 2]\n  ",
    "the quick brown fox jumps true false",
]


def make_tokenizer():
    """Return a byte-level BPE of some words. Ids 0 and 1 are its special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=alphabet,
        special_tokens=["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(WORDS, trainer)
    return tokenizer


TOKENIZER = make_tokenizer()
ENDS = (1, 2)
VOCABULARY = TOKENIZER.get_vocab_size() + 37  # a checkpoint's matrix has more rows than its tokenizer has tokens
CONSTRAINTS = Constraints(TOKENIZER.to_str(), VOCABULARY, ENDS)


def params(**constraint):
    if "choice" in constraint:
        constraint["choice"] = pb.ChoiceConstraint(choices=constraint["choice"])
    return pb.SamplingParams(**constraint)


def compiled(**constraint):
    new_grammar = CONSTRAINTS.compile(params(**constraint))
    assert new_grammar is not None
    return new_grammar


def grammar_of(**constraint):
    return compiled(**constraint)()


def allowed_ids(sequence):
    words = sequence.allowed()
    assert words.dtype == np.int32 and words.shape == (-(-VOCABULARY // 32),)
    ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))
    assert len(ids) > 0 and ids[-1] < TOKENIZER.get_vocab_size() and ids[0] != 0
    return ids.tolist()


def walk(sequence, choose, most=400):
    """Return the allowed tokens that ``choose`` picks, up to an end token; None without an end in ``most`` tokens."""
    tokens: list[int] = []
    while len(tokens) < most:
        token = choose(allowed_ids(sequence))
        sequence.accept(token)
        if token in ENDS:
            return tokens
        tokens.append(token)
    return None


def at_random(seed):
    rng = np.random.default_rng(seed)
    return lambda ids: int(rng.choice(ids))


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["red", "blue", 3, None]}, "minItems": 1, "maxItems": 3},
        "inner": {"anyOf": [{"type": "boolean"}, {"$ref": "#/$defs/pair"}]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {
        "pair": {"type": "array", "prefixItems": [{"const": "世界"}, {"type": "null"}], "minItems": 2, "items": False}
    },
}


def valid_json(text):
    jsonschema.validate(json.loads(text), SCHEMA)
    return True


CASES: dict[str, tuple[dict[str, Any], Callable[[str], Any]]] = {
    "json_schema": ({"json_schema": json.dumps(SCHEMA)}, valid_json),
    "regex": ({"regex": r"\d{3}-[a-f]+(é|🙂)?x"}, re.compile(r"\d{3}-[a-f]+(é|🙂)?x").fullmatch),
    "choice": ({"choice": ["red", "red fox", '"🙂\n', "b/lue\\"]}, ["red", "red fox", '"🙂\n', "b/lue\\"].count),
    "lark": (
        {"grammar": 'start: sum\nsum: NUMBER ("+" NUMBER)?\nNUMBER: /[0-9]{1,3}/'},
        re.compile(r"[0-9]{1,3}(\+[0-9]{1,3})?").fullmatch,
    ),
    "gbnf": ({"grammar": 'root ::= "fox" (" " [a-c]+)? "."'}, re.compile(r"fox( [a-c]+)?\.").fullmatch),
}


@pytest.mark.parametrize("case", CASES)
def test_random_allowed_tokens_satisfy_the_constraint(case):
    constraint, is_valid = CASES[case]
    new_grammar = compiled(**constraint)
    texts = set()
    for seed in range(20):
        tokens = walk(new_grammar(), at_random(seed))
        assert tokens is not None
        text = TOKENIZER.decode(tokens, skip_special_tokens=False)
        assert is_valid(text), text
        texts.add(text)
    assert len(texts) > 2


def test_json_object_allows_objects_only():
    (opening,) = allowed_ids(sequence := grammar_of(json_object=True))[:1]
    assert TOKENIZER.decode([opening]).startswith("{")
    for token in TOKENIZER.encode('{"name": [1, {"age": true}]}').ids:
        assert not set(ENDS) & set(allowed_ids(sequence))
        sequence.accept(token)
    assert allowed_ids(sequence) == list(ENDS)


def test_end_tokens_are_allowed_exactly_if_the_output_may_end():
    sequence = grammar_of(regex="a(bb)?")
    ends = []
    for text in "abb":
        ends.append(set(ENDS) <= set(allowed_ids(sequence)))
        assert ends[-1] or not set(ENDS) & set(allowed_ids(sequence))
        sequence.accept(TOKENIZER.token_to_id(text))
    assert ends == [False, True, False]
    assert allowed_ids(sequence) == list(ENDS)


@pytest.mark.parametrize("complete", ["a", "ab"])
def test_after_the_end_only_end_tokens_are_allowed(complete):
    """With ``ignore_eos`` they do not stop the sequence, and fill the output."""
    sequence = grammar_of(regex="ab?")
    for token in [*TOKENIZER.encode(complete).ids, ENDS[1], ENDS[0], ENDS[1]]:
        assert token in allowed_ids(sequence)
        sequence.accept(token)
    assert allowed_ids(sequence) == list(ENDS)


def test_white_space_of_json_is_bounded():
    blank = {id for token, id in TOKENIZER.get_vocab().items() if re.fullmatch("[ĠĊĉ]+", token)}
    assert len(blank) > 4
    sequence, run, longest = grammar_of(json_schema=json.dumps({"type": "array", "items": {"type": "null"}})), 0, 0
    for _ in range(200):
        ids = allowed_ids(sequence)
        token = next((id for id in ids if id in blank), ids[0])
        run = run + 1 if token in blank else 0
        longest = max(longest, run)
        sequence.accept(token)
    assert 1 < longest <= 33


def test_schema_can_set_its_white_space():
    schema = {
        "x-guidance": {"whitespace_pattern": "\n{3}"},
        "type": "array",
        "prefixItems": [{"type": "null"}],
        "minItems": 1,
    }
    sequence = grammar_of(json_schema=json.dumps(schema))
    for token in TOKENIZER.encode("[\n\n\nnull").ids:
        sequence.accept(token)


def test_sequences_of_one_request_are_independent():
    new_grammar = compiled(json_schema=json.dumps(SCHEMA))
    alone = [walk(new_grammar(), at_random(seed)) for seed in range(3)]
    sequences, choices = [new_grammar() for _ in range(3)], [at_random(seed) for seed in range(3)]
    written: list[list[int]] = [[], [], []]
    for _ in range(max(map(len, alone)) + 1):
        for sequence, choose, tokens in zip(sequences, choices, written, strict=True):
            tokens.append(choose(allowed_ids(sequence)))
            sequence.accept(tokens[-1])
    for tokens, expected in zip(written, alone, strict=True):
        assert tokens[: len(expected)] == expected and tokens[len(expected)] in ENDS


def test_token_that_is_not_allowed_raises():
    sequence = grammar_of(regex="ab")
    with pytest.raises(ValueError, match="doesn't satisfy"):
        sequence.accept(TOKENIZER.token_to_id("b"))
    with pytest.raises(ValueError, match="doesn't satisfy"):
        sequence.allowed()


def test_dead_end_raises_instead_of_ending_the_output():
    new_grammar = compiled(grammar=f'start: "{"x" * 20}" A\nA: /a/ & /b/')
    sequence, other = new_grammar(), new_grammar()
    for _ in range(20):
        sequence.accept(TOKENIZER.token_to_id("x"))
    with pytest.raises(ValueError, match="no text can follow"):
        sequence.allowed()
    assert allowed_ids(other) == [TOKENIZER.token_to_id("x")]


def test_model_chooses_the_tokens_of_a_forced_text():
    """Otherwise the library tokenizes all of it at every step, 0.1 s for these few bytes with a large vocabulary."""
    tokens = allowed_ids(grammar_of(regex="(the quick brown fox){100000}"))
    assert {"t", "the"} <= {TOKENIZER.decode([token]) for token in tokens}


def test_ambiguous_grammar_reaches_a_limit_before_its_steps_take_long():
    sequence, a, slowest = grammar_of(grammar='start: s\ns: s s s | s s | "a" | ""'), TOKENIZER.token_to_id("a"), 0.0
    with pytest.raises(ValueError, match="items"):
        for _ in range(100):
            started = time.thread_time()
            sequence.accept(a)
            sequence.allowed()
            slowest = max(slowest, time.thread_time() - started)
    assert slowest < 0.5  # 0.02 here, seconds without the limit


def test_limit_reached_by_one_request_does_not_affect_the_next(monkeypatch):
    monkeypatch.setattr(grammar, "LIMITS", llguidance.LLParserLimits(max_lexer_states=300, verbose_errors=False))
    for seed in range(2):
        sequence, choose, steps = grammar_of(regex="(a|b)*a(a|b){60}"), at_random(seed), 0
        with pytest.raises(ValueError, match="too many states"):
            for _ in range(1000):
                sequence.accept(choose([id for id in allowed_ids(sequence) if id not in ENDS]))
                steps += 1
        assert steps > 20


@pytest.mark.parametrize(
    ("constraint", "message"),
    [
        ({"json_schema": "{"}, "sampling_params.json_schema cannot be compiled: EOF while parsing"),
        ({"json_schema": '{"not": {}}'}, "sampling_params.json_schema cannot be compiled: .*not"),
        ({"json_schema": ""}, "sampling_params.json_schema must not be empty"),
        ({"regex": "(?=a)b"}, "sampling_params.regex cannot be compiled: .*look-around"),
        (
            {"regex": "a" * (MAX_GRAMMAR_BYTES + 1)},
            f"sampling_params.regex must have at most {MAX_GRAMMAR_BYTES} bytes",
        ),
        ({"grammar": "start: a"}, "sampling_params.grammar cannot be compiled: "),
        ({"choice": []}, "sampling_params.choice.choices must hold at least one"),
        ({"regex": "(" * 1000}, "sampling_params.regex cannot be compiled: .{400} \\.\\.\\.$"),
    ],
    ids=range(8),
)
def test_rejection_names_the_field_and_the_reason(constraint, message):
    with pytest.raises(InvalidField, match=message):
        CONSTRAINTS.compile(params(**constraint))


def test_structural_tag_is_not_supported():
    with pytest.raises(Unsupported, match=r"sampling_params\.structural_tag"):
        CONSTRAINTS.compile(params(structural_tag="{}"))


def word_level():
    return Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")).to_str()


@pytest.mark.parametrize(
    ("tokenizer", "ends", "reason"),
    [
        (TOKENIZER.to_str(), (), "no end token"),
        (word_level(), (1,), "cannot read"),
        ("\n" + word_level(), (9,), "cannot read"),
    ],
)
def test_model_without_grammars_rejects_constraints(tokenizer, ends, reason):
    constraints = Constraints(tokenizer, VOCABULARY, ends)
    assert constraints.compile(pb.SamplingParams()) is None
    with pytest.raises(Unsupported, match=reason):
        constraints.compile(params(regex="a"))


def test_request_without_constraint_has_no_grammar():
    assert CONSTRAINTS.compile(pb.SamplingParams(temperature=1)) is None
    assert CONSTRAINTS.compile(params(json_object=False)) is None


def test_constraint_is_checked_once(monkeypatch):
    texts = []

    def check(kind, text):
        texts.append((kind, text))
        return "start: /a+/"

    monkeypatch.setattr(grammar, "checked", check)
    constraints = Constraints(TOKENIZER.to_str(), VOCABULARY, ENDS)
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(constraints.compile, [params(regex="a+")] * 8 + [params(grammar="a+")]))
    constraints.compile(params(regex="a+"))
    assert set(texts) == {("regex", "a+"), ("grammar", "a+")} and len(texts) < 9
