"""From sampling parameters and metadata of a call to what the engine takes, or a refusal that names the field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.config import MAX_LOGIT_BIAS, MAX_LOGPROBS, MAX_PRIORITY, MAX_STOP_IDS, ModelConfig, QueuePolicy
from gimbal_jax.serving.engine.request import PRIORITY_KEY, SamplingParams

MAX_PENALTY = 2.0
"""Frequency and presence penalties are in [-MAX_PENALTY, MAX_PENALTY], as in vLLM and OpenAI's API."""
MAX_BIAS = 100.0
"""Values of logit_bias are in [-MAX_BIAS, MAX_BIAS], as in OpenAI's API."""

_GREEDY_BELOW = 1e-5
"""A lower temperature is greedy, as in vLLM: logits divided by it overflow."""


class InvalidField(ValueError):
    """A field holds a value that no server could serve; the text names both."""


class Unsupported(Exception):
    """A field asks for something that this server does not do; the text names it."""


class Precondition(Exception):
    """The model or the server lacks what a request needs; the text says what to do."""


def require(good: bool, field: str, rule: str, value: object = None) -> None:
    """Raises InvalidField: ``field`` must ``rule``."""
    if not good:
        raise InvalidField(f"{field} must {rule}" + ("" if value is None else f", got {value}"))


def parse_priority(metadata: Iterable[tuple[str, str | bytes]], queue: QueuePolicy) -> int:
    """The priority in a call's metadata, 0 without one. Raises InvalidField."""
    values = [str(value) for key, value in metadata if key == PRIORITY_KEY]
    if not values:
        return 0
    is_integer = re.fullmatch(r"[+-]?\d{1,9}", values[-1], re.ASCII) is not None
    priority = int(values[-1]) if is_integer else MAX_PRIORITY + 1
    return check_priority(priority, PRIORITY_KEY, queue, values[-1])


def check_priority(priority: int, field: str, queue: QueuePolicy, value: object) -> int:
    """The priority, if it is one that this queue heeds; raises InvalidField with the ``value`` that came."""
    require(abs(priority) <= MAX_PRIORITY, field, f"be an integer in [{-MAX_PRIORITY}, {MAX_PRIORITY}]", value)
    require(priority == 0 or queue == "priority", field, "be 0 where the queue policy is not priority", priority)
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
