"""Parses gRPC requests: checks every field of a message, and returns what the frontend is to generate.

Every error message names the field, its rule and the value. Unset proto3 fields mean vLLM's defaults.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.config import (
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_STOP_IDS,
    EngineConfig,
    ModelConfig,
    QueuePolicy,
    ServerConfig,
)
from gimbal_jax.exceptions import InvalidField, Unsupported, require
from gimbal_jax.serving.engine.limits import max_sequence_tokens
from gimbal_jax.serving.engine.prefix import page_hashes
from gimbal_jax.serving.engine.request import PRIORITY_KEY, Grammar, SamplingParams
from gimbal_jax.serving.frontend.choices import Generation
from gimbal_jax.serving.text.grammar import Constraints
from gimbal_jax.serving.text.tokenizer import Tokenizer

MAX_REQUEST_ID = 256
"""Maximum number of characters in a request id."""
MAX_CHOICES = 64
"""Maximum number of sequences of one request (``n``)."""
MAX_STOP_STRINGS = 16
"""Maximum number of stop strings of one request."""
MAX_STOP_CHARACTERS = 256
"""Maximum number of characters in a stop string."""
MAX_PENALTY = 2.0
"""Largest absolute value of frequency and presence penalties, as in vLLM and OpenAI's API."""
MAX_BIAS = 100.0
"""Largest absolute value of a logit bias, as in OpenAI's API."""
LONG_PROMPT = 2048
"""Number of tokens above which a prompt is checked and hashed in a thread: 32,768 tokens take 5 ms."""

_GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM: dividing logits by them overflows."""
_UNSUPPORTED = ("mm_inputs", "extra_mm_inputs", "media_refs", "kv_transfer_params", "kv_transfer_params_json")
"""Fields of a GenerateRequest that the server rejects."""


@dataclass(frozen=True)
class Limits:
    """The limits that requests are checked against, and the tools that turn them into tokens."""

    model: ModelConfig
    config: ServerConfig
    tokenizer: Tokenizer | None
    """Tokenizer of the model; None if it has none, and then requests must send token ids."""
    constraints: Constraints | None
    """Compiler of constraints; None without a tokenizer."""
    new_seed: Callable[[], int]
    """Function that returns a uint32, the seed of a request without one."""


def max_prompt_tokens(config: EngineConfig) -> int:
    """Return the length of the longest prompt that leaves room for one new token."""
    return max_sequence_tokens(config) - 1


def is_slow(request: pb.GenerateRequest) -> bool:
    """Return whether parsing the request may take too long for an event loop."""
    is_constrained = request.sampling_params.WhichOneof("constraint") is not None
    return request.HasField("text") or is_constrained or len(request.tokenized.input_ids) > LONG_PROMPT


def parse_priority(metadata: Iterable[tuple[str, str | bytes]], queue: QueuePolicy) -> int:
    """Return the priority in a call's metadata, 0 if it has none. Raises InvalidField."""
    values = [str(value) for key, value in metadata if key == PRIORITY_KEY]
    if not values:
        return 0
    is_integer = re.fullmatch(r"[+-]?\d{1,9}", values[-1], re.ASCII) is not None
    priority = int(values[-1]) if is_integer else MAX_PRIORITY + 1
    rule = f"be an integer in [{-MAX_PRIORITY}, {MAX_PRIORITY}]"
    require(abs(priority) <= MAX_PRIORITY, PRIORITY_KEY, rule, values[-1])
    require(priority == 0 or queue == "priority", PRIORITY_KEY, "be 0 where the queue policy is not priority", priority)
    return priority


def parse_generate(request: pb.GenerateRequest, limits: Limits) -> Generation:
    """Check every field of a GenerateRequest and return its Generation.

    It is slow if ``is_slow`` returns True. Raises InvalidField or Unsupported.
    """
    for descriptor, _ in request.ListFields():
        if descriptor.name in _UNSUPPORTED:
            raise Unsupported(f"{descriptor.name} is not supported by this server")
    params, engine_limits = request.sampling_params, limits.config.engine
    field, prompt = _prompt(request, limits)
    require(len(request.request_id) <= MAX_REQUEST_ID, "request_id", f"have at most {MAX_REQUEST_ID} characters")
    engine = _pinned_engine(request, limits.config.mesh.dp)
    # Truncation comes before all checks of the prompt: only the tokens that remain must be valid.
    tokens = _checked_prompt(field, _truncated(prompt, params, engine_limits), limits)
    room = max_sequence_tokens(engine_limits) - len(tokens)
    sampling = _parse_sampling(params, limits.model, room, limits.new_seed)
    # A prompt with log probabilities is computed whole, so it cannot use cached pages.
    is_cacheable = engine_limits.prefix_cache and sampling.prompt_logprobs is None
    return Generation(
        prompt=tokens,
        sampling=sampling,
        n=_choices(params, sampling),
        stops=_stops(params, limits.tokenizer),
        include_stop=params.include_stop_str_in_output,
        skip_special_tokens=params.skip_special_tokens,
        new_grammar=_grammar(params, limits.constraints),
        engine=engine,
        page_hashes=page_hashes(tokens, engine_limits.page_size) if is_cacheable else (),
    )


def _prompt(request: pb.GenerateRequest, limits: Limits) -> tuple[str, Sequence[int]]:
    """Return the name of the field that holds the prompt, and the prompt's tokens."""
    if request.WhichOneof("input") != "text":
        return "tokenized.input_ids", request.tokenized.input_ids
    tokenizer = limits.tokenizer
    if tokenizer is None:
        raise InvalidField("text must be empty, since the model has no tokenizer: send tokenized.input_ids")
    # Tokenizing a text that is far too long would take seconds.
    limit = max_prompt_tokens(limits.config.engine)
    is_truncated = request.sampling_params.HasField("truncate_prompt_tokens")
    fits = is_truncated or not tokenizer.surely_exceeds(request.text, limit)
    require(fits, "text", f"hold at most {limit} tokens", f"{len(request.text)} characters")
    return "text", tokenizer.encode(request.text)


def _pinned_engine(request: pb.GenerateRequest, engines: int) -> int | None:
    """Return the engine that the client chose; None if it left the choice to the server."""
    if not request.HasField("data_parallel_rank"):
        return None
    engine = request.data_parallel_rank
    require(0 <= engine < engines, "data_parallel_rank", f"be in [0, {engines - 1}]", engine)
    return engine


def _truncated(prompt: Sequence[int], params: pb.SamplingParams, config: EngineConfig) -> Sequence[int]:
    """Return the last tokens of the prompt, as many as truncate_prompt_tokens asks for."""
    if not params.HasField("truncate_prompt_tokens"):
        return prompt
    count, limit = params.truncate_prompt_tokens, max_prompt_tokens(config)
    field, rule = "sampling_params.truncate_prompt_tokens", f"be -1 (as many as fit) or in [1, {limit}]"
    require(count == -1 or 1 <= count <= limit, field, rule, count)
    return prompt[-(limit if count == -1 else count) :]


def _checked_prompt(field: str, prompt: Sequence[int], limits: Limits) -> tuple[int, ...]:
    """Return the prompt if it has a valid length and valid token ids; errors name ``field``."""
    require(len(prompt) > 0, field, "hold at least one token")
    limit = max_prompt_tokens(limits.config.engine)
    require(len(prompt) <= limit, field, f"hold at most {limit} tokens", len(prompt))
    largest, vocab_size = max(prompt), limits.model.vocab_size
    require(largest < vocab_size, field, f"hold token ids in [0, {vocab_size - 1}]", largest)
    return tuple(prompt)


def _choices(params: pb.SamplingParams, sampling: SamplingParams) -> int:
    """Return the number of outputs, 1 if it is unset."""
    require(params.n <= MAX_CHOICES, "sampling_params.n", f"be in [1, {MAX_CHOICES}]", params.n)
    # vLLM's rule: greedy outputs would all be equal.
    require(params.n <= 1 or sampling.temperature > 0, "sampling_params.n", "be 1 where temperature is 0", params.n)
    return params.n or 1


def _stops(params: pb.SamplingParams, tokenizer: Tokenizer | None) -> tuple[str, ...]:
    """Return the stop strings, each once."""
    field, stops = "sampling_params.stop", tuple(dict.fromkeys(params.stop))
    rule = "be empty, since the model has no tokenizer: send stop_token_ids"
    require(not stops or tokenizer is not None, field, rule)
    require(len(stops) <= MAX_STOP_STRINGS, field, f"hold at most {MAX_STOP_STRINGS} strings", len(stops))
    for stop in stops:
        rule = f"hold strings of 1 to {MAX_STOP_CHARACTERS} characters"
        require(1 <= len(stop) <= MAX_STOP_CHARACTERS, field, rule, len(stop))
    return stops


def _grammar(params: pb.SamplingParams, constraints: Constraints | None) -> Callable[[], Grammar] | None:
    """Return a function that makes a Grammar for one sequence; None without a constraint."""
    field = params.WhichOneof("constraint")
    if field is None:
        return None
    require(constraints is not None, f"sampling_params.{field}", "be unset, since the model has no tokenizer")
    assert constraints is not None
    return constraints.compile(params)


def _parse_sampling(
    params: pb.SamplingParams, model: ModelConfig, room: int, new_seed: Callable[[], int]
) -> SamplingParams:
    """Check the sampling parameters and replace unset ones by vLLM's defaults.

    ``room`` is the number of tokens that fit after the prompt, and the limit of max_tokens.
    """

    def check(good: bool, field: str, rule: str) -> None:
        require(good, f"sampling_params.{field}", rule, getattr(params, field))

    # Which tokens may be drawn, and with which probability.
    temperature = params.temperature if params.HasField("temperature") else 1.0
    check(math.isfinite(temperature) and temperature >= 0, "temperature", "be finite and at least 0")
    top_p = params.top_p if params.top_p != 0 else 1.0
    check(0 < top_p <= 1, "top_p", "be in (0, 1]")
    check(0 <= params.min_p <= 1, "min_p", "be in [0, 1]")
    for penalty in ("frequency_penalty", "presence_penalty"):
        check(abs(getattr(params, penalty)) <= MAX_PENALTY, penalty, f"be in [{-MAX_PENALTY:g}, {MAX_PENALTY:g}]")
    repetition_penalty = params.repetition_penalty if params.repetition_penalty != 0 else 1.0
    check(0 < repetition_penalty < math.inf, "repetition_penalty", "be finite and above 0 (0 is unset)")
    # How many tokens, and what is reported of them.
    max_tokens = params.max_tokens if params.HasField("max_tokens") else room
    check(max_tokens >= 1, "max_tokens", "be at least 1")
    max_tokens = min(max_tokens, room)
    check(params.min_tokens <= max_tokens, "min_tokens", f"be in [0, {max_tokens}] for this prompt and max_tokens")
    for count in ("logprobs", "prompt_logprobs"):
        good = not params.HasField(count) or 0 <= getattr(params, count) <= MAX_LOGPROBS
        check(good, count, f"be in [0, {MAX_LOGPROBS}]")
    check(not params.HasField("seed") or params.seed >= 0, "seed", f"be in [0, {2**31 - 1}]")

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_k=params.top_k if params.top_k < model.vocab_size else 0,
        top_p=top_p,
        min_p=params.min_p,
        seed=params.seed if params.HasField("seed") else new_seed(),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        stop_token_ids=_stop_token_ids(params, model),
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        repetition_penalty=repetition_penalty,
        logit_bias=_logit_bias(params, model),
        prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
    )


def _stop_token_ids(params: pb.SamplingParams, model: ModelConfig) -> tuple[int, ...]:
    """Return the tokens that end the output, each once: the model's end tokens, then the client's."""
    field = "sampling_params.stop_token_ids"
    stop_ids = tuple(dict.fromkeys([*(() if params.ignore_eos else model.eos_token_ids), *params.stop_token_ids]))
    largest = max(params.stop_token_ids, default=0)
    require(largest < model.vocab_size, field, f"be in [0, {model.vocab_size - 1}]", largest)
    rule = f"be at most {MAX_STOP_IDS}, the model's end tokens included"
    require(len(stop_ids) <= MAX_STOP_IDS, field, rule, len(stop_ids))
    return stop_ids


def _logit_bias(params: pb.SamplingParams, model: ModelConfig) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) by rising token id."""
    field = "sampling_params.logit_bias"
    require(len(params.logit_bias) <= MAX_LOGIT_BIAS, field, f"hold at most {MAX_LOGIT_BIAS} tokens")
    for token_id, bias in params.logit_bias.items():
        require(0 <= token_id < model.vocab_size, field, f"hold token ids in [0, {model.vocab_size - 1}]", token_id)
        # A NaN fails every comparison.
        require(abs(bias) <= MAX_BIAS, field, f"hold values in [{-MAX_BIAS:g}, {MAX_BIAS:g}]", bias)
    return tuple(sorted(params.logit_bias.items()))
