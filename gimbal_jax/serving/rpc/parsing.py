"""From a request's message to what is to be generated, or a refusal that names the field."""

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
    check_length(request.text, request.sampling_params, limits.tokenizer, limits)
    return parse_prompt(request, "text", limits.tokenizer.encode(request.text), limits)


def check_length(text: str, params: pb.SamplingParams, tokenizer: Tokenizer, limits: Limits) -> None:
    """Refuse a text that is far too long before it is tokenized, which would take seconds."""
    limit = max_prompt_tokens(limits.config.engine)
    too_long = tokenizer.surely_exceeds(text, limit) and not params.HasField("truncate_prompt_tokens")
    require(not too_long, "text", f"hold at most {limit} tokens", f"{len(text)} characters")


def is_slow(request: pb.GenerateRequest) -> bool:
    """True where parsing may take so long that it should not hold up an event loop."""
    constrained = request.sampling_params.WhichOneof("constraint") is not None
    return request.HasField("text") or constrained or len(request.tokenized.input_ids) > LONG_PROMPT


def parse_prompt(request: pb.GenerateRequest, field: str, prompt: Sequence[int], limits: Limits) -> Generation:
    """Check the fields of a request whose prompt tokens came in ``field``. Raises InvalidField or Unsupported."""
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


MAX_PENALTY = 2.0
"""Frequency and presence penalties are in [-MAX_PENALTY, MAX_PENALTY], as in vLLM and OpenAI's API."""


MAX_BIAS = 100.0
"""Values of logit_bias are in [-MAX_BIAS, MAX_BIAS], as in OpenAI's API."""


_GREEDY_BELOW = 1e-5
"""A lower temperature is greedy, as in vLLM: logits divided by it overflow."""


def parse_priority(metadata: Iterable[tuple[str, str | bytes]], queue: QueuePolicy) -> int:
    """The priority in a call's metadata, 0 without one. Raises InvalidField."""
    values = [str(value) for key, value in metadata if key == PRIORITY_KEY]
    if not values:
        return 0
    is_integer = re.fullmatch(r"[+-]?\d{1,9}", values[-1], re.ASCII) is not None
    priority = int(values[-1]) if is_integer else MAX_PRIORITY + 1
    rule = f"be an integer in [{-MAX_PRIORITY}, {MAX_PRIORITY}]"
    require(abs(priority) <= MAX_PRIORITY, PRIORITY_KEY, rule, values[-1])
    require(priority == 0 or queue == "priority", PRIORITY_KEY, "be 0 where the queue policy is not priority", priority)
    return priority


def parse_sampling(
    params: pb.SamplingParams, model: ModelConfig, room: int, new_seed: Callable[[], int]
) -> SamplingParams:
    """Raises InvalidField. Unset proto3 fields mean the defaults of vLLM.

    ``room`` is the number of tokens that fit after the prompt; longer outputs are cut there.
    """

    def check(good: bool, field: str, rule: str) -> None:
        require(good, f"sampling_params.{field}", rule, getattr(params, field))

    temperature = params.temperature if params.HasField("temperature") else 1.0
    check(math.isfinite(temperature) and temperature >= 0, "temperature", "be finite and at least 0")
    top_p = params.top_p if params.top_p != 0 else 1.0
    check(0 < top_p <= 1, "top_p", "be in (0, 1]")
    check(0 <= params.min_p <= 1, "min_p", "be in [0, 1]")
    for penalty in ("frequency_penalty", "presence_penalty"):
        check(abs(getattr(params, penalty)) <= MAX_PENALTY, penalty, f"be in [{-MAX_PENALTY:g}, {MAX_PENALTY:g}]")
    repetition_penalty = params.repetition_penalty if params.repetition_penalty != 0 else 1.0
    check(0 < repetition_penalty < math.inf, "repetition_penalty", "be finite and above 0 (0 is unset)")
    max_tokens = params.max_tokens if params.HasField("max_tokens") else room
    check(max_tokens >= 1, "max_tokens", "be at least 1")
    max_tokens = min(max_tokens, room)
    check(params.min_tokens <= max_tokens, "min_tokens", f"be in [0, {max_tokens}] for this prompt and max_tokens")
    for count in ("logprobs", "prompt_logprobs"):
        good = not params.HasField(count) or 0 <= getattr(params, count) <= MAX_LOGPROBS
        check(good, count, f"be in [0, {MAX_LOGPROBS}]")
    if params.HasField("seed"):
        check(params.seed >= 0, "seed", f"be in [0, {2**31 - 1}]")

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
    field = "sampling_params.stop_token_ids"
    stop_ids = tuple(dict.fromkeys([*(() if params.ignore_eos else model.eos_token_ids), *params.stop_token_ids]))
    largest = max(params.stop_token_ids, default=0)
    require(largest < model.vocab_size, field, f"be in [0, {model.vocab_size - 1}]", largest)
    rule = f"be at most {MAX_STOP_IDS}, the model's end tokens included"
    require(len(stop_ids) <= MAX_STOP_IDS, field, rule, len(stop_ids))
    return stop_ids


def _logit_bias(params: pb.SamplingParams, model: ModelConfig) -> tuple[tuple[int, float], ...]:
    field = "sampling_params.logit_bias"
    require(len(params.logit_bias) <= MAX_LOGIT_BIAS, field, f"hold at most {MAX_LOGIT_BIAS} tokens")
    for token_id, bias in params.logit_bias.items():
        require(0 <= token_id < model.vocab_size, field, f"hold token ids in [0, {model.vocab_size - 1}]", token_id)
        # A NaN fails every comparison.
        require(abs(bias) <= MAX_BIAS, field, f"hold values in [{-MAX_BIAS:g}, {MAX_BIAS:g}]", bias)
    return tuple(sorted(params.logit_bias.items()))
