"""Rotary embedding settings of a Hugging Face config, as ``modeling_rope_utils.py`` of transformers 5.24 reads them."""

from __future__ import annotations

from gimbal_jax.config import RopeConfig
from gimbal_jax.model.json_reader import JsonReader

KINDS = ("default", "linear", "yarn", "llama3")


def parse_rope(config: JsonReader, max_position: int) -> RopeConfig:
    """``RopeConfig`` from ``rope_parameters`` (transformers 5) or ``rope_scaling`` and ``rope_theta`` (4).

    Problems go to the reader's list; the result is then meaningless.
    """
    parameters, scaling = config.get("rope_parameters", {}), config.get("rope_scaling", {})
    name, values = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    if not isinstance(values, dict):
        config.refuse(name, "want an object")
        return RopeConfig()
    rope = JsonReader(values, config.problems, f"{name}.")

    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KINDS:
        rope.refuse("type" if rope.get("rope_type", None) is None else "rope_type", f"want one of {', '.join(KINDS)}")
        return RopeConfig()
    if rope.get("partial_rotary_factor", 1) != 1:
        rope.refuse("partial_rotary_factor", "only 1 is supported")
    theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
    # A length beside the rope object wins over the one in it; without either, training saw max_position.
    original = config.integer(
        "original_max_position_embeddings", rope.integer("original_max_position_embeddings", max_position)
    )

    result = RopeConfig(theta=theta)
    if kind == "linear":
        result = RopeConfig(theta=theta, kind="linear", factor=rope.number("factor", None))
    elif kind == "llama3":
        result = RopeConfig(
            theta=theta,
            kind="llama3",
            factor=rope.number("factor", None),
            original_max_position=original,
            low_freq_factor=rope.number("low_freq_factor", None),
            high_freq_factor=rope.number("high_freq_factor", None),
        )
        if result.high_freq_factor <= result.low_freq_factor:
            rope.refuse("high_freq_factor", f"want more than low_freq_factor = {result.low_freq_factor:g}")
    elif kind == "yarn":
        result = RopeConfig(
            theta=theta,
            kind="yarn",
            # A null factor, but not an absent one, means the ratio of the two lengths.
            factor=rope.number("factor", max_position / original if "factor" in values else None),
            original_max_position=original,
            # Hugging Face reads 0 as absent for these two.
            beta_fast=rope.number("beta_fast", None) if rope.get("beta_fast", None) else 32.0,
            beta_slow=rope.number("beta_slow", None) if rope.get("beta_slow", None) else 1.0,
            attention_factor=_optional_number(rope, "attention_factor"),
            mscale=_optional_number(rope, "mscale"),
            mscale_all_dim=_optional_number(rope, "mscale_all_dim"),
            truncate=rope.flag("truncate", True),
        )
    rope.refuse_unread()
    return result


def _optional_number(read: JsonReader, key: str) -> float | None:
    return None if read.get(key, None) is None else read.number(key, None)
