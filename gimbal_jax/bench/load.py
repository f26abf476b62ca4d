"""The requests of a benchmark: lengths, arrival times and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np
import tokenizers

from gimbal_jax.bench.replay import Call, TraceRow, read_trace, scale_trace

SHIPPED_TRACE = "sharegpt-like"
"""Name of the trace in the package. Its conversations have lengths as mixed as ShareGPT's."""
INPUT_LEN, OUTPUT_LEN = 128, 64
Lengths = Sequence[tuple[int, int]]
"""Prompt and output tokens of each request."""


@dataclass(frozen=True)
class LoadConfig:
    """Load of each round. Raises ValueError that names the field and its range."""

    requests: int = 32
    input_len: int | None = None
    """Prompt tokens of every request, or their mean with a trace. None: 128, or unscaled for a trace from a file."""
    output_len: int | None = None
    """Output tokens of every request, or their mean with a trace. None: 64, or unscaled for a trace from a file."""
    trace: str | None = None
    """Lengths from this CSV file, or from the shipped one (``SHIPPED_TRACE``), instead of fixed ones."""
    shared_prefix: float = 0.0
    """Share of each prompt's tokens that belong to a prefix common to all prompts of all rounds."""
    rounds: int = 3
    warmup: int = 1
    """Number of warm-up rounds, which are not counted."""
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"requests": 1, "input_len": 1, "output_len": 1, "rounds": 1, "warmup": 0, "seed": 0}
        for name, bound in least.items():
            if (value := getattr(self, name)) is not None and value < bound:
                raise ValueError(f"{name} must be at least {bound}, not {value}")
        if not 0 <= self.shared_prefix < 1:
            raise ValueError(f"shared_prefix must be from 0 to below 1, not {self.shared_prefix:g}")


def lengths_of(load: LoadConfig) -> Lengths:
    """Return fixed lengths, or the lengths of a trace's first ``requests`` rows, scaled to the means of the load."""
    if load.trace is None:
        return [(load.input_len or INPUT_LEN, load.output_len or OUTPUT_LEN)] * load.requests
    if load.trace == SHIPPED_TRACE:
        with resources.as_file(resources.files("gimbal_jax") / "data" / "azure_llm_2023_conv.csv") as path:
            rows = read_trace(path)
        means: tuple[int | None, int | None] = load.input_len or INPUT_LEN, load.output_len or OUTPUT_LEN
    else:
        rows, means = read_trace(Path(load.trace)), (load.input_len, load.output_len)
    if len(rows) < load.requests:
        raise ValueError(f"requests must be at most the {len(rows)} of {load.trace}, not {load.requests}")
    return scaled_lengths(rows[: load.requests], *means)


def scaled_lengths(rows: Sequence[TraceRow], input_mean: int | None, output_mean: int | None) -> Lengths:
    """Return lengths scaled to these means (None: unscaled), rounded, and at least 1."""
    own_2 = np.mean([(row.input_tokens, row.output_tokens) for row in rows], axis=0)
    scaled = scale_trace(
        rows,
        seconds=1.0,
        input_tokens=1.0 if input_mean is None else input_mean / own_2[0],
        output_tokens=1.0 if output_mean is None else output_mean / own_2[1],
    )
    return [(row.input_tokens, row.output_tokens) for row in scaled]


def poisson_arrivals(count: int, rate: float, rng: np.random.Generator) -> np.ndarray:
    """Return the arrival times [count] of a Poisson process of ``rate`` requests per second."""
    return rng.exponential(1 / rate, count).cumsum()


def make_calls(
    load: LoadConfig,
    lengths: Lengths,
    token_ids: np.ndarray,
    *,
    kind: Literal["warmup", "offline", "online"],
    round_number: int,
    rate: float | None = None,
) -> list[Call]:
    """Return the requests of a round. They are all due at 0 without a ``rate``, otherwise Poisson.

    Prompts are drawn from ``token_ids``. Each round draws others, so only the shared prefix can hit the prefix cache.
    It depends on the seed alone.
    """
    rng = np.random.default_rng((load.seed, ("warmup", "offline", "online").index(kind), round_number))
    arrivals = np.zeros(len(lengths)) if rate is None else poisson_arrivals(len(lengths), rate, rng)
    shared = np.random.default_rng(load.seed).choice(token_ids, max(inputs for inputs, _ in lengths))
    calls = []
    for number, (arrival, (inputs, outputs)) in enumerate(zip(arrivals, lengths, strict=True)):
        common = round(load.shared_prefix * inputs)
        prompt = (*shared[:common].tolist(), *rng.choice(token_ids, inputs - common).tolist())
        calls.append(Call(float(arrival), prompt, outputs, seed=number))
    return calls


def one_token_words(tokenizer_json: str) -> dict[int, str]:
    """Return words of one token, each after a blank, by token id.

    Their prompts have the same tokens if they are sent as ids or as text. Raises ValueError for fewer than 100 words.
    """
    tokenizer = tokenizers.Tokenizer.from_str(tokenizer_json)
    texts = tokenizer.decode_batch([[id] for id in range(tokenizer.get_vocab_size())])
    words = {id: text for id, text in enumerate(texts) if text[:1] == " " and text[1:].isascii() and text[1:].isalpha()}
    encodings = tokenizer.encode_batch(list(words.values()), add_special_tokens=False)
    found = {id: word for (id, word), encoding in zip(words.items(), encodings, strict=True) if encoding.ids == [id]}
    if len(found) < 100:
        raise ValueError(f"tokenizer: only {len(found)} words are one token each, at least 100 are needed for prompts")
    return found
