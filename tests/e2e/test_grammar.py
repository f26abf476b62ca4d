"""Structured output on real steps: constrained rows match their grammar, and free rows do not change."""

import json
import re
from dataclasses import replace

import jsonschema
import numpy as np
import pytest
from smg_grpc_proto import vllm_engine_pb2 as pb
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gimbal_jax.serving.engine.request import Request, SamplingParams
from gimbal_jax.serving.text.grammar import Constraints
from tests.e2e.rig import MODEL, SOURCES, random_requests, session

SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "tag": {"enum": ["red", "blue", None]},
        "text": {"type": "string", "maxLength": 8},
    },
    "required": ["id", "tag", "text"],
    "additionalProperties": False,
}
REGEX = "[a-c]{4,12}(, [x-z]{1,9})?!"


def make_tokenizer():
    """A token for every printable character of ASCII, and a special one; the model has more rows."""
    characters = [chr(code) for code in range(ord("!"), ord("~") + 1)]
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate([*characters, "Ġ", "Ċ"])}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


TOKENIZER = make_tokenizer()
END = TOKENIZER.token_to_id("<|end|>")
CONSTRAINTS = Constraints(TOKENIZER.to_str(), MODEL.vocab_size, (END,))
JSON = CONSTRAINTS.compile(pb.SamplingParams(json_schema=json.dumps(SCHEMA)))
LETTERS = CONSTRAINTS.compile(pb.SamplingParams(regex=REGEX))


def constrained(count, new_grammar, **sampling):
    """Requests for as long an output as fits."""
    params = SamplingParams(max_tokens=80, stop_token_ids=(END,))
    return [
        Request(
            f"{id(new_grammar)}-{i}",
            (1, 2, 3 + i),
            replace(params, seed=i, **sampling),
            0.0,
            i % SOURCES,
            i + 100,
            0,
            new_grammar(),
        )
        for i in range(count)
    ]


def test_constrained_rows_match_their_grammar_and_change_no_free_row(runner):
    free = random_requests(np.random.default_rng(5), 10)
    with session(runner) as quiet:
        expected = quiet.run(free)
    free = random_requests(np.random.default_rng(5), 10)  # with grammars of their own again
    of_schema, of_regex = constrained(6, JSON), constrained(6, LETTERS, temperature=0.0)
    with session(runner) as mixed:
        tokens = mixed.run([*of_schema, *free, *of_regex])
        assert mixed.server.status().preemptions > 0
        ends = mixed.ends
    assert {request.id: tokens[request.id] for request in free} == expected
    for request in of_schema:
        jsonschema.validate(json.loads(TOKENIZER.decode(tokens[request.id])), SCHEMA)
    for request in of_regex:
        assert re.fullmatch(REGEX, TOKENIZER.decode(tokens[request.id]))
    assert {ends[request.id] for request in of_schema + of_regex} == {"stop"}
    assert len({tuple(tokens[request.id]) for request in of_schema}) == len(of_schema)


@pytest.mark.parametrize("extra", [{"stop_token_ids": ()}, {"min_tokens": 70, "max_tokens": 75}])
def test_a_complete_output_continues_with_end_tokens_up_to_its_minimum(runner, extra):
    (request,) = constrained(1, LETTERS, **extra)
    with session(runner) as alone:
        tokens = alone.run([request])[request.id]
        assert alone.ends == {request.id: "length" if "stop_token_ids" in extra else "stop"}
    assert len(tokens) == extra.get("min_tokens", 80)
    length = tokens.index(END)
    assert re.fullmatch(REGEX, TOKENIZER.decode(tokens[:length])) and set(tokens[length:]) == {END}
