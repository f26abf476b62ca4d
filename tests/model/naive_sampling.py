"""vLLM's changes of logits by their definitions, in float64 numpy, one sequence at a time."""

from collections.abc import Iterable, Mapping

import numpy as np


def adjusted(
    logits_V: np.ndarray,
    *,
    prompt: Iterable[int] = (),
    output: Iterable[int] = (),
    bias: Mapping[int, float] | None = None,
    suppress: Iterable[int] = (),
    allowed: Iterable[int] | None = None,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
) -> np.ndarray:
    """Return the logits from which the next token after prompt and output is chosen."""
    prompt, output = list(prompt), list(output)
    changed_V = logits_V.astype(np.float64)
    for token, value in (bias or {}).items():
        changed_V[token] += value
    for token in range(len(changed_V)):
        if token in set(suppress) or (allowed is not None and token not in set(allowed)):
            changed_V[token] = -np.inf
    for token in set(prompt) | set(output):
        positive = changed_V[token] > 0
        changed_V[token] = changed_V[token] / repetition if positive else changed_V[token] * repetition
    for token in set(output):
        changed_V[token] -= frequency * output.count(token) + presence
    return changed_V


def bits(allowed: Iterable[int], vocab: int) -> np.ndarray:
    """Return the mask of these tokens in a grammar's form, int32: token t is bit t % 32 of element t // 32."""
    words = [0] * -(-vocab // 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return np.array(words, np.uint32).astype(np.int32)
