"""Chunks of the client from messages of the server, with their text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.client.records import Chunk
from gimbal_jax.serving.engine.request import TokenLogprobs
from gimbal_jax.serving.text.stops import OutputText
from gimbal_jax.serving.text.tokenizer import Tokenizer


def new_text(params: pb.SamplingParams, tokenizer: Tokenizer) -> OutputText:
    """Return the text of one output of a request. It ends where the server ends the output."""
    return OutputText(
        tokenizer.decoder(params.skip_special_tokens),
        tuple(params.stop),
        params.include_stop_str_in_output,
        params.min_tokens,
    )


def chunk_of(response: pb.GenerateResponse, stream: bool, texts: Sequence[OutputText] | None) -> Chunk:
    """Return the chunk of a message.

    ``texts`` holds the text so far of each output, and grows; None gives chunks without text.
    """
    is_complete = response.WhichOneof("response") == "complete"
    message = response.complete if is_complete else response.chunk
    # The last message of a stream repeats all tokens, which the chunks have brought already.
    is_news = not (is_complete and stream)
    token_ids = () if not is_news else tuple(message.output_ids if is_complete else message.token_ids)
    text = ""
    if texts is not None:
        text, _ = texts[message.index].add(token_ids)
        if is_complete and texts[message.index].matched is None:
            text += texts[message.index].rest()
    return Chunk(
        token_ids=token_ids,
        text=text,
        logprobs=_logprobs(message.output_logprobs.token_logprobs, message.output_logprobs) if token_ids else (),
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        cached_tokens=message.cached_tokens,
        finish_reason=message.finish_reason if is_complete else None,
        stop_token_id=message.matched_token_id if is_complete and message.HasField("matched_token_id") else None,
        stop_text=message.matched_stop_str if is_complete and message.HasField("matched_stop_str") else None,
        index=message.index,
        prompt_logprobs=_prompt_logprobs(message.input_logprobs) if is_news else (),
    )


def _prompt_logprobs(message: pb.InputLogProbs) -> tuple[TokenLogprobs, ...]:
    # The first prompt token has no log probability.
    return _logprobs([entry.value for entry in message.token_logprobs], message)[1:]


def _logprobs(chosen: Iterable[float], message: pb.OutputLogProbs | pb.InputLogProbs) -> tuple[TokenLogprobs, ...]:
    tops = message.top_logprobs or [pb.TopLogProbs()] * len(message.token_logprobs)
    return tuple(
        TokenLogprobs(value, tuple(top.token_ids), tuple(top.values)) for value, top in zip(chosen, tops, strict=True)
    )
