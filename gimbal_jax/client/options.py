"""The sampling options of the client, and the request that is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict, Unpack

from smg_grpc_proto import vllm_engine_pb2 as pb


class SamplingOptions(TypedDict, total=False):
    """Sampling options of one request, as keywords of ``GimbalClient.generate``.

    Names, meanings and defaults are vLLM's. The server checks the values; InvalidRequest names the field and its range.
    """

    max_tokens: int | None
    """Maximum number of output tokens; None (the default) allows as many as fit after the prompt."""
    min_tokens: int
    """Number of tokens before which no end token and no stop string ends the output; 0 by default."""
    temperature: float
    """Divisor of the logits, at least 0; 1 by default, 0 is greedy."""
    top_k: int
    """Number of most likely tokens to draw from; 0 (the default) means all."""
    top_p: float
    """Probability mass of the most likely tokens to draw from, in (0, 1]; 1 by default."""
    min_p: float
    """Least probability of a drawn token relative to the most likely one, in [0, 1]; 0 by default."""
    frequency_penalty: float
    """Logit penalty of a token for each time it is in the output, in [-2, 2]; 0 by default."""
    presence_penalty: float
    """Logit penalty of a token that is in the output, in [-2, 2]; 0 by default."""
    repetition_penalty: float
    """Divisor of positive logits, and factor of negative ones, of tokens in prompt or output; above 0, 1 by default."""
    n: int
    """Number of outputs, in [1, 64]; 1 by default. More than one needs a temperature above 0."""
    seed: int | None
    """Seed of the draws, in [0, 2**31 - 1]; None (the default) takes a new one each time."""
    logprobs: int | None
    """Number of most likely tokens to report for each output token, in [0, 20]; None (the default) reports nothing."""
    prompt_logprobs: int | None
    """Number of most likely tokens to report for each prompt token, in [0, 20]; None (the default) reports nothing."""
    logit_bias: Mapping[int, float] | None
    """Value in [-100, 100] that is added to the logit of each token id, at most 300 token ids."""
    stop: Sequence[str]
    """Strings that end the output, at most 16; they need a model with a tokenizer."""
    include_stop_str_in_output: bool
    """Whether the text keeps the stop string at its end; False by default."""
    stop_token_ids: Sequence[int]
    """Token ids that end the output in addition to the model's end tokens, at most 16 together."""
    ignore_eos: bool
    """Whether the model's end tokens do not end the output; False by default."""
    truncate_prompt_tokens: int | None
    """Number of last prompt tokens to keep; -1 keeps as many as fit, None (the default) keeps all."""
    json_schema: str | None
    """JSON schema that the output must match. At most one of json_schema, regex and choice may be set."""
    regex: str | None
    """Regular expression that the output must match."""
    choice: Sequence[str] | None
    """Strings of which the output must be one."""


def generate_request(
    prompt: str | None,
    token_ids: Sequence[int] | None,
    stream: bool,
    request_id: str,
    engine: int | None,
    **sampling: Unpack[SamplingOptions],
) -> pb.GenerateRequest:
    """Return the message of ``GimbalClient.generate``.

    Raises ValueError unless exactly one of prompt and token_ids is given, and for an option that does not exist.
    """
    if (prompt is None) == (token_ids is None):
        raise ValueError("give either prompt or token_ids")
    if unknown := sampling.keys() - SamplingOptions.__annotations__.keys():
        raise ValueError(f"unknown sampling options: {', '.join(sorted(unknown))}")
    choice = sampling.pop("choice", None)
    params = pb.SamplingParams(
        **sampling,
        choice=None if choice is None else pb.ChoiceConstraint(choices=choice),
        skip_special_tokens=True,  # the client decodes without them, and stop strings must match that text
    )
    return pb.GenerateRequest(
        request_id=request_id,
        text=prompt,
        tokenized=None if token_ids is None else pb.TokenizedInput(input_ids=token_ids),
        sampling_params=params,
        stream=stream,
        data_parallel_rank=engine,
    )
