"""From a GenerateRequest to prompt token ids and SamplingParams, or a refusal that names the field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.config import (
    MAX_LOGPROBS,
    MAX_PRIORITY,
    MAX_STOP_IDS,
    EngineConfig,
    ModelConfig,
    QueuePolicy,
    ServerConfig,
)
from gimbal_jax.serving.engine import max_sequence_tokens
from gimbal_jax.serving.request import PRIORITY_KEY, SamplingParams

MAX_REQUEST_ID = 256
"""Most characters of a request id."""

_GREEDY_BELOW = 1e-5
"""A lower temperature is greedy, as in vLLM: logits divided by it overflow."""


class InvalidField(ValueError):
    """A field holds a value that no server could serve; the text names both."""


class Unsupported(Exception):
    """A field asks for something that this server does not do; the text names it."""


@dataclass(frozen=True)
class Parsed:
    """A request as the frontend takes it."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    engine: int | None
    """The engine that the client pinned the request to."""


def max_prompt_tokens(config: EngineConfig) -> int:
    """Longest prompt that leaves room for one new token."""
    return max_sequence_tokens(config) - 1


def parse_generate(
    request: pb.GenerateRequest,
    model: ModelConfig,
    config: ServerConfig,
    encode: Callable[[str], Sequence[int]] | None,
    new_seed: Callable[[], int],
) -> Parsed:
    """Check every field. Unset proto3 fields mean the defaults of vLLM.

    ``encode`` is None where the checkpoint has no tokenizer; ``new_seed`` gives a
    uint32 for a request without one. Raises InvalidField or Unsupported.
    """
    _refuse_unsupported(request)
    _require(len(request.request_id) <= MAX_REQUEST_ID, "request_id", f"have at most {MAX_REQUEST_ID} characters")
    engine = None
    if request.HasField("data_parallel_rank"):
        engine = request.data_parallel_rank
        _require(0 <= engine < config.mesh.dp, "data_parallel_rank", f"be in [0, {config.mesh.dp - 1}]", engine)
    prompt = _prompt(request, model, config.engine, encode)
    room = max_sequence_tokens(config.engine) - len(prompt)
    return Parsed(prompt, _sampling(request.sampling_params, model, room, new_seed), engine)


def parse_priority(metadata: Iterable[tuple[str, str | bytes]], queue: QueuePolicy) -> int:
    """The priority in a call's metadata, 0 without one. Raises InvalidField."""
    values = [str(value) for key, value in metadata if key == PRIORITY_KEY]
    if not values:
        return 0
    is_integer = re.fullmatch(r"[+-]?\d{1,9}", values[-1], re.ASCII) is not None
    priority = int(values[-1]) if is_integer else None
    rule = f"be an integer in [{-MAX_PRIORITY}, {MAX_PRIORITY}]"
    _require(priority is not None and abs(priority) <= MAX_PRIORITY, PRIORITY_KEY, rule, values[-1])
    _require(
        priority == 0 or queue == "priority", PRIORITY_KEY, "be 0 where the queue policy is not priority", priority
    )
    return priority or 0


def _require(good: bool, field: str, rule: str, value: object = None) -> None:
    if not good:
        raise InvalidField(f"{field} must {rule}" + ("" if value is None else f", got {value}"))


def _refuse_unsupported(request: pb.GenerateRequest) -> None:
    params = request.sampling_params
    present = {
        "mm_inputs": request.HasField("mm_inputs"),
        "extra_mm_inputs": bool(request.extra_mm_inputs),
        "media_refs": request.HasField("media_refs"),
        "kv_transfer_params": request.HasField("kv_transfer_params"),
        "kv_transfer_params_json": request.HasField("kv_transfer_params_json"),
        "sampling_params.frequency_penalty": params.frequency_penalty != 0,
        "sampling_params.presence_penalty": params.presence_penalty != 0,
        "sampling_params.repetition_penalty": params.repetition_penalty not in (0, 1),
        "sampling_params.stop": bool(params.stop),
        "sampling_params.n": params.n > 1,
        "sampling_params.logit_bias": bool(params.logit_bias),
        "sampling_params.prompt_logprobs": params.HasField("prompt_logprobs"),
        "sampling_params.truncate_prompt_tokens": params.HasField("truncate_prompt_tokens"),
        f"sampling_params.{params.WhichOneof('constraint')}": params.WhichOneof("constraint") is not None,
    }
    for field, is_present in present.items():
        if is_present:
            raise Unsupported(f"{field} is not supported by this server")


def _prompt(
    request: pb.GenerateRequest,
    model: ModelConfig,
    config: EngineConfig,
    encode: Callable[[str], Sequence[int]] | None,
) -> tuple[int, ...]:
    if request.WhichOneof("input") == "text":
        field = "text"
        if encode is None:
            raise InvalidField("text must be empty, since the model has no tokenizer: send tokenized.input_ids")
        prompt = tuple(encode(request.text))
    else:
        field = "tokenized.input_ids"
        prompt = tuple(request.tokenized.input_ids)
    _require(len(prompt) > 0, field, "hold at least one token")
    limit = max_prompt_tokens(config)
    _require(len(prompt) <= limit, field, f"hold at most {limit} tokens", len(prompt))
    _require(max(prompt) < model.vocab_size, field, f"hold token ids in [0, {model.vocab_size - 1}]", max(prompt))
    return prompt


def _sampling(params: pb.SamplingParams, model: ModelConfig, room: int, new_seed: Callable[[], int]) -> SamplingParams:
    """``room`` is the number of tokens that fit after the prompt; longer outputs are cut there."""

    def require(good: bool, field: str, rule: str) -> None:
        _require(good, f"sampling_params.{field}", rule, getattr(params, field))

    temperature = params.temperature if params.HasField("temperature") else 1.0
    require(math.isfinite(temperature) and temperature >= 0, "temperature", "be finite and at least 0")
    top_p = params.top_p if params.top_p != 0 else 1.0
    require(0 < top_p <= 1, "top_p", "be in (0, 1]")
    require(0 <= params.min_p <= 1, "min_p", "be in [0, 1]")
    max_tokens = params.max_tokens if params.HasField("max_tokens") else room
    require(max_tokens >= 1, "max_tokens", "be at least 1")
    max_tokens = min(max_tokens, room)
    require(params.min_tokens <= max_tokens, "min_tokens", f"be in [0, {max_tokens}] for this prompt and max_tokens")
    if params.HasField("logprobs"):
        require(0 <= params.logprobs <= MAX_LOGPROBS, "logprobs", f"be in [0, {MAX_LOGPROBS}]")
    if params.HasField("seed"):
        require(params.seed >= 0, "seed", f"be in [0, {2**31 - 1}]")

    stop_ids = tuple(dict.fromkeys([*(() if params.ignore_eos else model.eos_token_ids), *params.stop_token_ids]))
    field = "sampling_params.stop_token_ids"
    largest = max(params.stop_token_ids, default=0)
    _require(largest < model.vocab_size, field, f"be in [0, {model.vocab_size - 1}]", largest)
    rule = f"be at most {MAX_STOP_IDS}, the model's end tokens included"
    _require(len(stop_ids) <= MAX_STOP_IDS, field, rule, len(stop_ids))

    return SamplingParams(
        max_tokens=max_tokens,
        min_tokens=params.min_tokens,
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_k=params.top_k if params.top_k < model.vocab_size else 0,
        top_p=top_p,
        min_p=params.min_p,
        seed=params.seed if params.HasField("seed") else new_seed(),
        logprobs=params.logprobs if params.HasField("logprobs") else None,
        stop_token_ids=stop_ids,
    )
