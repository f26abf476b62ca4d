"""Parser of rotary embedding settings, with the rules of ``modeling_rope_utils.py`` in transformers 5.24."""

from __future__ import annotations

from gimbal_jax.config import RopeConfig
from gimbal_jax.model.json_reader import JsonReader

KINDS = ("default", "linear", "yarn", "llama3")
"""Kinds of scaling that are supported, in Hugging Face's names."""


def parse_rope(config: JsonReader, max_position: int) -> RopeConfig:
    """Return the ``RopeConfig`` of ``rope_parameters`` (transformers 5) or of ``rope_scaling`` and ``rope_theta`` (4).

    Problems are appended to the reader's list. The result is meaningless if there is a problem.
    """
    parameters, scaling = config.get("rope_parameters", {}), config.get("rope_scaling", {})
    name, values = ("rope_scaling", scaling) if scaling else ("rope_parameters", parameters)
    if not isinstance(values, dict):
        config.refuse(name, "want an object")
        return RopeConfig()
    rope = JsonReader(values, config.problems, f"{name}.")

    # transformers 4 called the key "type".
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in KINDS:
        rope.refuse("type" if rope.get("rope_type", None) is None else "rope_type", f"want one of {', '.join(KINDS)}")
        return RopeConfig()
    if rope.get("partial_rotary_factor", 1) != 1:
        rope.refuse("partial_rotary_factor", "only 1 is supported")
    theta = rope.number("rope_theta", config.number("rope_theta", 10_000.0))
    # A length next to the rope object takes precedence over the one inside it. The default is max_position.
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
            # A null factor means the ratio of the two lengths. An absent factor is a problem.
            factor=rope.number("factor", max_position / original if "factor" in values else None),
            original_max_position=original,
            # Hugging Face treats 0 as absent for these two.
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
