"""Limits that follow from an engine's configuration."""

from __future__ import annotations

from gimbal_jax.config import EngineConfig


def max_sequence_tokens(config: EngineConfig) -> int:
    """Return the most tokens of one sequence, prompt and output together; a prompt must be shorter."""
    return min(config.max_model_len, config.num_pages * config.page_size)


def check_limits(config: EngineConfig) -> None:
    """Raise ValueError if an engine with these limits could not make progress."""
    for name in ("max_model_len", "page_size", "num_pages", "max_rows", "token_budget", "tile", "max_queue"):
        if getattr(config, name) < 1:
            raise ValueError(f"{name} must be at least 1, not {getattr(config, name)}")
    least = max(config.max_rows, config.tile)
    if config.token_budget < least:
        raise ValueError(f"token_budget must be at least max_rows and tile ({least}), not {config.token_budget}")
