"""Parser of Hugging Face's ``config.json``, in the forms of transformers 4 and 5, to ``ModelConfig``.

Keys have the meaning and the default values of ``Qwen3MoeConfig`` and ``modeling_qwen3_moe.py`` in transformers 5.24.
The parser rejects settings that this package does not compute, and names all of them in one error.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gimbal_jax.config import ModelConfig, RopeConfig
from gimbal_jax.model.hf_rope import parse_rope
from gimbal_jax.model.json_reader import JsonReader

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
)
"""Files of a Hugging Face folder that are not weights."""
DTYPES = ("bfloat16", "float16", "float32")
"""Types of weights that are supported."""


class ConfigError(ValueError):
    """A model configuration that is malformed or asks for an unsupported feature; ``problems`` holds one text each."""

    def __init__(self, problems: list[str]):
        self.problems = tuple(problems)
        super().__init__("model configuration rejected: " + "; ".join(problems))


# Keys of which only one value is supported. Null and an absent key mean that value.
_ONLY_VALUE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_act": "silu",
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    # Qwen3-Coder-480B-A35B has these two keys.
    "use_qk_norm": True,
    "shared_expert_intermediate_size": 0,
}

# Keys that do not change what the network computes at inference.
_HARMLESS = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "attention_dropout",
        "chunk_size_feed_forward",
        "id2label",
        "initializer_range",
        "label2id",
        "max_window_layers",
        "name_or_path",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "sliding_window",  # read only if use_sliding_window is on
        "tokenizer_class",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_cache",
    }
)


def load_config(folder: Path) -> ModelConfig:
    """Read ``folder/config.json``.

    Token ids of ``generation_config.json`` take precedence, as in Hugging Face's ``generate``.

    Raises:
      ConfigError: the folder has no config.json, or ``parse_config`` rejects it.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError([f"{folder} holds no config.json: it is not a checkpoint folder"])
    hf = _read_object(folder / "config.json")
    generation_file = folder / "generation_config.json"
    generation = _read_object(generation_file) if generation_file.exists() else {}
    keys = ("bos_token_id", "pad_token_id", "eos_token_id")
    return parse_config(hf | {key: generation[key] for key in keys if generation.get(key) is not None})


def parse_config(hf: Mapping[str, Any]) -> ModelConfig:
    """Return the ``ModelConfig`` of the JSON object of a ``config.json``. Raise ConfigError that names all problems."""
    problems: list[str] = []
    read = JsonReader(hf, problems)
    _refuse_other_architectures(read)

    hidden_size = read.integer("hidden_size", 2048)
    num_layers = read.integer("num_hidden_layers", 24)
    num_heads = read.integer("num_attention_heads", 32)
    num_kv_heads = read.integer("num_key_value_heads", 4)
    head_dim = read.integer("head_dim", max(hidden_size // num_heads, 1))
    experts_key = "num_experts" if read.get("num_local_experts", None) is None else "num_local_experts"
    num_experts = read.integer(experts_key, 128)
    experts_per_token = read.integer("num_experts_per_tok", 8)
    vocab_size = read.integer("vocab_size", 151936)
    max_position = read.integer("max_position_embeddings", 32768)
    # The window is read only if it is switched on. Then all layers have it; max_window_layers has no effect.
    sliding_window = read.integer("sliding_window", 4096) if read.flag("use_sliding_window", False) else None
    dtype = read.get("dtype", read.get("torch_dtype", "bfloat16"))

    # Rules that relate several keys.
    if num_heads % num_kv_heads:
        read.refuse("num_key_value_heads", f"want a divisor of num_attention_heads = {num_heads}")
    if head_dim % 2:
        read.refuse("head_dim", "want an even number for the rotary embedding")
    if experts_key == "num_local_experts" and read.get("num_experts", num_experts) != num_experts:
        read.refuse("num_experts", f"but num_local_experts is {num_experts}")
    if experts_per_token > num_experts:
        read.refuse("num_experts_per_tok", f"want at most the number of experts = {num_experts}")
    if dtype not in DTYPES:
        problems.append(f"dtype is {dtype!r}; want one of {', '.join(DTYPES)}")

    config = ModelConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=read.integer("intermediate_size", 6144),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        num_experts=num_experts,
        experts_per_token=experts_per_token,
        moe_intermediate_size=read.integer("moe_intermediate_size", 768),
        moe_layers=_moe_layers(read, num_layers),
        norm_topk_prob=read.flag("norm_topk_prob", False),
        tie_embeddings=read.flag("tie_word_embeddings", False),
        attention_bias=read.flag("attention_bias", False),
        sliding_window=sliding_window,
        rms_norm_eps=read.number("rms_norm_eps", 1e-6),
        rope=parse_rope(read, max_position),
        max_position=max_position,
        dtype=dtype,
        weights_dtype=dtype,
        bos_token_id=_single(_token_ids(read, "bos_token_id", vocab_size)),
        pad_token_id=_single(_token_ids(read, "pad_token_id", vocab_size)),
        eos_token_ids=_token_ids(read, "eos_token_id", vocab_size),
    )
    # Now every supported key has been read; other keys may change what the network computes.
    read.refuse_unread(_HARMLESS)
    if problems:
        raise ConfigError(problems)
    return config


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError([f"{path} is not JSON: {error}"]) from error
    if not isinstance(value, dict):
        raise ConfigError([f"{path} holds a {type(value).__name__}; want a JSON object"])
    return value


def _refuse_other_architectures(read: JsonReader) -> None:
    if read.get("model_type", None) != "qwen3_moe":
        read.refuse("model_type", "only 'qwen3_moe' is supported")
    for key, only in _ONLY_VALUE.items():
        if read.get(key, only) != only:
            read.refuse(key, f"only {only!r} is supported")


def _moe_layers(read: JsonReader, num_layers: int) -> tuple[int, ...]:
    dense = read.get("mlp_only_layers", [])
    if not isinstance(dense, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in dense):
        read.refuse("mlp_only_layers", f"want a list of layer indices in [0, {num_layers})")
        dense = []
    step = read.integer("decoder_sparse_step", 1)
    layers = tuple(layer for layer in range(num_layers) if layer not in dense and (layer + 1) % step == 0)
    if not layers:
        read.problems.append("mlp_only_layers and decoder_sparse_step leave no layer with experts; want at least one")
    return layers


def _token_ids(read: JsonReader, key: str, vocab_size: int) -> tuple[int, ...]:
    value = read.get(key, [])
    ids = value if isinstance(value, list) else [value]
    if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
        read.refuse(key, f"want token ids in [0, {vocab_size})")
        return ()
    return tuple(ids)


def _single(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _published(num_layers: int, **own: Any) -> ModelConfig:
    """Return a configuration with the values that the three published sizes share, and its own values."""
    return ModelConfig(
        vocab_size=151936,
        num_layers=num_layers,
        head_dim=128,
        experts_per_token=8,
        moe_layers=tuple(range(num_layers)),
        norm_topk_prob=True,
        eos_token_ids=(151645,),
        **own,
    )


# From the config.json of Qwen/Qwen3-30B-A3B, Qwen/Qwen3-235B-A22B and Qwen/Qwen3-Coder-480B-A35B-Instruct on the
# Hugging Face hub (transformers_version 4.51.0).
PRESETS: dict[str, ModelConfig] = {
    "Qwen3-30B-A3B": _published(
        num_layers=48,
        hidden_size=2048,
        intermediate_size=6144,
        num_heads=32,
        num_kv_heads=4,
        num_experts=128,
        moe_intermediate_size=768,
        max_position=40960,
        bos_token_id=151643,
    ),
    "Qwen3-235B-A22B": _published(
        num_layers=94,
        hidden_size=4096,
        intermediate_size=12288,
        num_heads=64,
        num_kv_heads=4,
        num_experts=128,
        moe_intermediate_size=1536,
        max_position=40960,
        bos_token_id=151643,
    ),
    "Qwen3-Coder-480B-A35B": _published(
        num_layers=62,
        hidden_size=6144,
        intermediate_size=8192,
        num_heads=96,
        num_kv_heads=8,
        num_experts=160,
        moe_intermediate_size=2560,
        max_position=262144,
        rope=RopeConfig(theta=10_000_000.0),
    ),
}
