"""From a request's message to what is to be generated, or a refusal that names the field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.config import EngineConfig, ModelConfig, ServerConfig
from gimbal_jax.protos.text_pb2 import TextRequest
from gimbal_jax.serving.engine.engine import max_sequence_tokens
from gimbal_jax.serving.engine.prefix import page_hashes
from gimbal_jax.serving.engine.request import Grammar, SamplingParams
from gimbal_jax.serving.rpc.validation import InvalidField, Unsupported, parse_sampling, require
from gimbal_jax.serving.text.tokenizer import Tokenizer

MAX_REQUEST_ID = 256
"""Most characters of a request id."""
MAX_CHOICES = 64
"""Most sequences of one request (``n``)."""
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 256
"""Most stop strings of one request, and the longest of them."""
LONG_PROMPT = 2048
"""Tokens of a prompt above which checking and hashing them takes a while: 32,768 take 5 ms."""

_UNSUPPORTED = (  # of a GenerateRequest
    "mm_inputs",
    "extra_mm_inputs",
    "media_refs",
    "kv_transfer_params",
    "kv_transfer_params_json",
)


class Constraints(Protocol):
    """Compiles what an output must look like (``grammar.Constraints``)."""

    def compile(self, params: pb.SamplingParams) -> Callable[[], Grammar] | None:
        """Gives a fresh Grammar for each sequence, None without a constraint. Raises InvalidField or Unsupported."""


@dataclass(frozen=True)
class Generation:
    """A validated request: one prompt, and ``n`` outputs to it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    n: int = 1
    stops: tuple[str, ...] = ()
    """Strings that end an output; only with a tokenizer."""
    include_stop: bool = False
    """Leave the stop string in the text."""
    skip_special_tokens: bool = False
    """Leave special tokens out of the text, in which stop strings are searched too."""
    new_grammar: Callable[[], Grammar] | None = None
    engine: int | None = None
    """The engine that the client pinned the request to."""
    page_hashes: tuple[bytes, ...] = ()
    """Of the prompt, where the prefix cache may know its beginning."""


@dataclass(frozen=True)
class Limits:
    """What requests are held to, and what turns them into tokens."""

    model: ModelConfig
    config: ServerConfig
    tokenizer: Tokenizer | None
    constraints: Constraints | None
    new_seed: Callable[[], int]
    """A uint32 for a request without a seed."""


def max_prompt_tokens(config: EngineConfig) -> int:
    """Longest prompt that leaves room for one new token."""
    return max_sequence_tokens(config) - 1


def parse_generate(request: pb.GenerateRequest, limits: Limits) -> Generation:
    """Check every field of a VllmEngine request. Raises InvalidField or Unsupported.

    Slow for long texts and for constraints.
    """
    for field, _ in request.ListFields():
        if field.name in _UNSUPPORTED:
            raise Unsupported(f"{field.name} is not supported by this server")
    if request.WhichOneof("input") != "text":
        prompt: Sequence[int] = request.tokenized.input_ids
        return parse_prompt(request, "tokenized.input_ids", prompt, limits)
    if limits.tokenizer is None:
        raise InvalidField("text must be empty, since the model has no tokenizer: send tokenized.input_ids")
    check_length("text", request.text, request.sampling_params, limits.tokenizer, limits)
    return parse_prompt(request, "text", limits.tokenizer.encode(request.text), limits)


def check_length(field: str, text: str, params: pb.SamplingParams, tokenizer: Tokenizer, limits: Limits) -> None:
    """Refuse a text that is far too long before it is tokenized, which would take seconds."""
    limit = max_prompt_tokens(limits.config.engine)
    too_long = tokenizer.surely_exceeds(text, limit) and not params.HasField("truncate_prompt_tokens")
    require(not too_long, field, f"hold at most {limit} tokens", f"{len(text)} characters")


def is_slow(request: pb.GenerateRequest) -> bool:
    """True where parsing may take so long that it should not hold up an event loop."""
    constrained = request.sampling_params.WhichOneof("constraint") is not None
    return request.HasField("text") or constrained or len(request.tokenized.input_ids) > LONG_PROMPT


def parse_prompt(
    request: pb.GenerateRequest | TextRequest, field: str, prompt: Sequence[int], limits: Limits
) -> Generation:
    """What all requests have in common: ``prompt`` came in ``field``, sampling_params and the rest in ``request``."""
    params = request.sampling_params
    require(len(request.request_id) <= MAX_REQUEST_ID, "request_id", f"have at most {MAX_REQUEST_ID} characters")
    engine = None
    if request.HasField("data_parallel_rank"):
        engine = request.data_parallel_rank
        last = limits.config.mesh.dp - 1
        require(0 <= engine <= last, "data_parallel_rank", f"be in [0, {last}]", engine)
    tokens = _checked_prompt(field, _truncated(prompt, params, limits.config.engine), limits)
    room = max_sequence_tokens(limits.config.engine) - len(tokens)
    sampling = parse_sampling(params, limits.model, room, limits.new_seed)
    # Log probabilities of the prompt come from computing all of it.
    cacheable = limits.config.engine.prefix_cache and sampling.prompt_logprobs is None
    return Generation(
        prompt=tokens,
        sampling=sampling,
        n=_choices(params, sampling),
        stops=_stops(params, limits.tokenizer),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        new_grammar=_grammar(params, limits.constraints),
        engine=engine,
        page_hashes=page_hashes(tokens, limits.config.engine.page_size) if cacheable else (),
    )


def _checked_prompt(field: str, prompt: Sequence[int], limits: Limits) -> tuple[int, ...]:
    require(len(prompt) > 0, field, "hold at least one token")
    limit = max_prompt_tokens(limits.config.engine)
    require(len(prompt) <= limit, field, f"hold at most {limit} tokens", len(prompt))
    largest, vocab_size = max(prompt), limits.model.vocab_size
    require(largest < vocab_size, field, f"hold token ids in [0, {vocab_size - 1}]", largest)
    return tuple(prompt)


def _truncated(prompt: Sequence[int], params: pb.SamplingParams, config: EngineConfig) -> Sequence[int]:
    """The last tokens of the prompt, as many as truncate_prompt_tokens says."""
    if not params.HasField("truncate_prompt_tokens"):
        return prompt
    wanted, limit = params.truncate_prompt_tokens, max_prompt_tokens(config)
    field, rule = "sampling_params.truncate_prompt_tokens", f"be -1 (as many as fit) or in [1, {limit}]"
    require(wanted == -1 or 1 <= wanted <= limit, field, rule, wanted)
    return prompt[-(limit if wanted == -1 else wanted) :]


def _choices(params: pb.SamplingParams, sampling: SamplingParams) -> int:
    require(params.n <= MAX_CHOICES, "sampling_params.n", f"be in [1, {MAX_CHOICES}]", params.n)
    # vLLM's rule: they would all be the same.
    require(params.n <= 1 or sampling.temperature > 0, "sampling_params.n", "be 1 where temperature is 0", params.n)
    return params.n or 1


def _stops(params: pb.SamplingParams, tokenizer: Tokenizer | None) -> tuple[str, ...]:
    field, stops = "sampling_params.stop", tuple(dict.fromkeys(params.stop))
    rule = "be empty, since the model has no tokenizer: send stop_token_ids"
    require(not stops or tokenizer is not None, field, rule)
    require(len(stops) <= MAX_STOP_STRINGS, field, f"hold at most {MAX_STOP_STRINGS} strings", len(stops))
    for stop in stops:
        rule = f"hold strings of 1 to {MAX_STOP_CHARACTERS} characters"
        require(1 <= len(stop) <= MAX_STOP_CHARACTERS, field, rule, len(stop))
    return stops


def _grammar(params: pb.SamplingParams, constraints: Constraints | None) -> Callable[[], Grammar] | None:
    field = params.WhichOneof("constraint")
    if field is None:
        return None
    require(constraints is not None, f"sampling_params.{field}", "be unset, since the model has no tokenizer")
    assert constraints is not None
    return constraints.compile(params)
