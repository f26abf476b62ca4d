"""Structured output: the tokens with which an output may go on, by llguidance."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable

import llguidance
import numpy as np
from smg_grpc_proto import vllm_engine_pb2 as pb

from gimbal_jax.exceptions import InvalidField, Unsupported, require
from gimbal_jax.serving.engine.request import Grammar
from gimbal_jax.serving.text.grammar_check import LIMITS, Kind, checked, problem_of

MAX_GRAMMAR_BYTES = 128 * 1024
"""Longest text of a constraint."""
_CACHED = 256
"""Constraints that are not checked again."""
_MAX_REASON = 400


class Constraints:
    """Compiles what clients ask of their outputs, for one model. Any thread may call ``compile``.

    Where the library cannot read the tokenizer, or the model has no end token, each constraint is refused.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """``vocab_size`` is the model's; ids beyond the tokenizer's are never allowed. Takes a second for 150,000."""
        self._vocab_size = vocab_size
        self._problem = "" if eos_token_ids else "the model has no end token"
        if eos_token_ids:
            try:
                self._tokenizer = llguidance.LLTokenizer(
                    tokenizer_json.lstrip(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
                )
            except ValueError as error:
                self._problem = f"its library cannot read the tokenizer: {error}"
        # Only the check is shared: requests that shared a lexer would fail together once it is full.
        self._checked = functools.lru_cache(_CACHED)(checked)

    def compile(self, params: pb.SamplingParams) -> Callable[[], Grammar] | None:
        """What gives each sequence of a request a grammar of its own; None without a constraint.

        ``json_schema``, ``json_object``, ``regex`` (that of Rust's regex crate, without look-around and
        back-references), ``choice``, and ``grammar``: llguidance's variant of Lark, or the GBNF of
        llama.cpp; without special tokens. White space in JSON is bounded, unless the schema's
        ``x-guidance`` says otherwise. The grammar begins with the first token, as with
        ``grammar_from_first_token``. Takes from milliseconds, if the text was seen before, to seconds.
        Raises InvalidField or Unsupported.
        """
        constraint = params.WhichOneof("constraint")
        if constraint is None or (constraint == "json_object" and not params.json_object):
            return None
        field = f"sampling_params.{constraint}"
        if constraint == "structural_tag":
            raise Unsupported(f"{field} is not supported by this server")
        if self._problem:
            raise Unsupported(f"{field} is not supported by this server: {self._problem}")
        kind, text = _kind_and_text(params, field)
        try:
            matcher = llguidance.LLMatcher(self._tokenizer, self._checked(kind, text), log_level=0, limits=LIMITS)
            first = _allowed(matcher, self._vocab_size)
        except ValueError as error:
            reason = str(error)
            reason = reason if len(reason) <= _MAX_REASON else reason[:_MAX_REASON] + " ..."
            raise InvalidField(f"{field} cannot be compiled: {reason}") from None
        return lambda: _Matched(matcher.deep_copy(), first, self._vocab_size)


class _Matched:
    """The Grammar of one sequence.

    After an end token, and where nothing can follow, only end tokens are allowed, so that with ``ignore_eos`` they
    fill the rest of the output (as in vLLM).
    """

    def __init__(self, matcher: llguidance.LLMatcher, first: np.ndarray, vocab_size: int) -> None:
        self._matcher = matcher
        self._allowed: np.ndarray | None = first
        self._vocab_size = vocab_size

    def allowed(self) -> np.ndarray:
        """ValueError where neither a token nor the end can follow, or a limit of the library is reached."""
        if self._allowed is None:
            self._allowed = _allowed(self._matcher, self._vocab_size)
        return self._allowed

    def accept(self, token_id: int) -> None:
        """ValueError where the token is not allowed."""
        self._allowed = None
        self._matcher.consume_token(token_id)
        _raise_problem(self._matcher)


def _kind_and_text(params: pb.SamplingParams, field: str) -> tuple[Kind, str]:
    kind = params.WhichOneof("constraint")
    if kind == "json_object":
        return "json_schema", '{"type": "object"}'
    if kind == "choice":
        require(len(params.choice.choices) > 0, f"{field}.choices", "hold at least one choice")
        text = json.dumps(list(params.choice.choices))
    else:
        text = getattr(params, kind)
        require(text != "", field, "not be empty")
    size = len(text.encode())
    require(size <= MAX_GRAMMAR_BYTES, field, f"have at most {MAX_GRAMMAR_BYTES} bytes", size)
    return kind, text


def _allowed(matcher: llguidance.LLMatcher, vocab_size: int) -> np.ndarray:
    allowed = np.zeros(-(-vocab_size // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(allowed.ctypes.data, allowed.nbytes)
    # In error the library allows the end tokens, as if the output were complete.
    _raise_problem(matcher)
    return allowed


def _raise_problem(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(problem_of(matcher))
