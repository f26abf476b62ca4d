"""Structured output: which tokens may come next, computed by llguidance."""

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
"""Longest text of a constraint, in bytes of UTF-8."""
_CACHED = 256
"""Most recent constraints whose check is remembered."""
_MAX_REASON = 400


class Constraints:
    """Compiler of the constraints in requests, for one model. Any thread may call ``compile``.

    If the library cannot read the tokenizer, or if the model has no end token, every constraint is rejected.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> None:
        """Read the tokenizer. This takes a second for 150,000 tokens.

        ``vocab_size`` is the model's. Token ids that the tokenizer does not have are never allowed.
        """
        self._vocab_size = vocab_size
        self._problem = "" if eos_token_ids else "the model has no end token"
        if eos_token_ids:
            try:
                self._tokenizer = llguidance.LLTokenizer(
                    tokenizer_json.lstrip(), n_vocab=vocab_size, eos_token=list(eos_token_ids)
                )
            except ValueError as error:
                self._problem = f"llguidance cannot read the tokenizer: {error}"
        # Requests share the check only. If they shared a lexer, they would all fail once it is full.
        self._checked = functools.lru_cache(_CACHED)(checked)

    def compile(self, params: pb.SamplingParams) -> Callable[[], Grammar] | None:
        """Return a function that makes a new grammar for each sequence of a request; None without a constraint.

        The constraints are:

        - ``json_schema`` and ``json_object``. White space is bounded unless the schema's ``x-guidance`` changes it.
        - ``regex``: the syntax of Rust's regex crate, without look-around and back-references.
        - ``choice``
        - ``grammar``: llguidance's variant of Lark, or the GBNF of llama.cpp, without special tokens.

        The grammar applies from the first token, as with ``grammar_from_first_token``. A call takes milliseconds
        if the text was compiled recently, and up to seconds otherwise. Raises InvalidField or Unsupported.
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

    After an end token, and if nothing else can follow, only end tokens are allowed. With ``ignore_eos`` they
    fill the rest of the output (vLLM's rule).
    """

    def __init__(self, matcher: llguidance.LLMatcher, first: np.ndarray, vocab_size: int) -> None:
        self._matcher = matcher
        self._allowed: np.ndarray | None = first
        self._vocab_size = vocab_size

    def allowed(self) -> np.ndarray:
        """Return a bit mask of the allowed tokens.

        Raises ValueError if neither a token nor the end can follow, or if a limit of the library is reached.
        """
        if self._allowed is None:
            self._allowed = _allowed(self._matcher, self._vocab_size)
        return self._allowed

    def accept(self, token_id: int) -> None:
        """Advance by one token. Raises ValueError if the token is not allowed."""
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
    # On an error the library allows the end tokens, as if the output were complete.
    _raise_problem(matcher)
    return allowed


def _raise_problem(matcher: llguidance.LLMatcher) -> None:
    if matcher.is_error():
        raise ValueError(problem_of(matcher))
