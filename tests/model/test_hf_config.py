"""Both forms of config.json give the same configuration, and no unsupported setting is ignored silently."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.config import RopeConfig
from gimbal_jax.model.hf_config import PRESETS, ConfigError, load_config, parse_config

GOLDENS = Path(__file__).parents[1] / "goldens"

# config.json of Qwen/Qwen3-Coder-480B-A35B-Instruct, every key.
CODER_480B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_dropout": 0.0,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 262144,
    "max_window_layers": 62,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 2560,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts": 160,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "qkv_bias": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.0,
    "shared_expert_intermediate_size": 0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_qk_norm": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

# config.json of Qwen/Qwen3-235B-A22B; Qwen/Qwen3-30B-A3B differs in sizes only.
SIZES_30B = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_window_layers": 48,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_hidden_layers": 48,
}
QWEN3_235B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "max_window_layers": 94,
    "mlp_only_layers": [],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "output_router_logits": False,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def minimal(**changes: Any) -> dict[str, Any]:
    return {"model_type": "qwen3_moe", **changes}


def problems(**changes: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as rejected:
        parse_config(minimal(**changes))
    return rejected.value.problems


def only_problem(**changes: Any) -> str:
    (problem,) = problems(**changes)
    return problem


def test_presets_are_the_published_configs() -> None:
    assert parse_config(CODER_480B) == PRESETS["Qwen3-Coder-480B-A35B"]
    assert parse_config(QWEN3_235B) == PRESETS["Qwen3-235B-A22B"]
    assert parse_config(QWEN3_235B | SIZES_30B) == PRESETS["Qwen3-30B-A3B"]


def test_the_transformers_5_form_gives_the_same_configuration() -> None:
    renamed = {"num_local_experts": "num_experts", "dtype": "torch_dtype"}
    v5 = {
        key: value for key, value in QWEN3_235B.items() if key not in (*renamed.values(), "rope_scaling", "rope_theta")
    }
    v5 |= {new: QWEN3_235B[old] for new, old in renamed.items()}
    v5["rope_parameters"] = {"rope_type": "default", "rope_theta": 1000000.0}
    assert parse_config(v5) == PRESETS["Qwen3-235B-A22B"]


def test_absent_keys_have_the_defaults_of_transformers() -> None:
    config = parse_config(minimal())
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (151936, 2048, 6144)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (24, 32, 4)
    assert config.head_dim == 64  # hidden_size / heads
    assert (config.num_experts, config.experts_per_token, config.moe_intermediate_size) == (128, 8, 768)
    assert config.norm_topk_prob is False
    assert config.sliding_window is None
    assert config.max_position == 32768
    assert config.rope == RopeConfig(theta=10_000.0)
    assert (config.bos_token_id, config.pad_token_id, config.eos_token_ids) == (None, None, ())


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("base", {}),
        ("no_norm_topk", {"norm_topk_prob": False}),
        ("sparse_step", {"num_layers": 4, "moe_layers": (1, 3)}),
        ("mlp_only", {"moe_layers": (0, 2)}),
        ("tied", {"tie_embeddings": True}),
        ("attention_bias", {"attention_bias": True}),
        ("yarn", {"rope": RopeConfig(10_000.0, "yarn", factor=8.0, original_max_position=32)}),
        ("linear_rope", {"rope": RopeConfig(10_000.0, "linear", factor=4.0)}),
        ("llama3_rope", {"rope": RopeConfig(10_000.0, "llama3", factor=8.0, original_max_position=32)}),
        ("sliding_window", {"sliding_window": 16}),
        ("kv1", {"num_kv_heads": 1}),
        ("v4_config", {"rope": RopeConfig(10_000.0, "linear", factor=2.0)}),
    ],
)
def test_goldens_differ_from_base_only_in_their_named_feature(name: str, changes: dict[str, Any]) -> None:
    assert load_config(GOLDENS / name) == replace(load_config(GOLDENS / "base"), **changes)


@given(st.integers(1, 12), st.integers(1, 5), st.sets(st.integers(0, 11)))
def test_moe_layers_follow_the_rule_of_the_decoder_layer(layers: int, step: int, dense: set[int]) -> None:
    hf = minimal(
        num_hidden_layers=layers, decoder_sparse_step=step, mlp_only_layers=sorted(d for d in dense if d < layers)
    )
    wanted = tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0)
    if wanted:
        assert parse_config(hf).moe_layers == wanted
    else:
        with pytest.raises(ConfigError, match="no layer with experts"):
            parse_config(hf)


@pytest.mark.parametrize("length_key_place", ["inside", "outside", "nowhere"])
def test_yarn(length_key_place: str) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16, "mscale": 0.7, "mscale_all_dim": 0.8}
    scaling |= {"truncate": False, "attention_factor": 1.5}
    hf = minimal(rope_theta=5e6, rope_scaling=scaling, max_position_embeddings=65536)
    if length_key_place == "inside":
        scaling["original_max_position_embeddings"] = 8192
    elif length_key_place == "outside":
        hf["original_max_position_embeddings"] = 8192
    rope = parse_config(hf).rope
    assert rope == RopeConfig(
        theta=5e6,
        kind="yarn",
        factor=4.0,
        original_max_position=65536 if length_key_place == "nowhere" else 8192,
        beta_fast=16.0,
        beta_slow=1.0,
        attention_factor=1.5,
        mscale=0.7,
        mscale_all_dim=0.8,
        truncate=False,
    )


def test_theta_in_the_rope_object_takes_precedence_and_a_null_yarn_factor_is_the_ratio_of_lengths() -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 7.0, "factor": None, "original_max_position_embeddings": 4096}
    rope = parse_config(minimal(rope_parameters=parameters, rope_theta=5.0, max_position_embeddings=32768)).rope
    assert (rope.theta, rope.factor) == (7.0, 8.0)


def test_sliding_window_is_read_only_if_switched_on() -> None:
    assert parse_config(minimal(sliding_window=512)).sliding_window is None
    assert parse_config(minimal(sliding_window=512, use_sliding_window=True)).sliding_window == 512
    assert parse_config(minimal(use_sliding_window=True)).sliding_window == 4096


def test_generation_config_decides_the_token_ids(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(minimal(eos_token_id=5, bos_token_id=3)))
    assert load_config(tmp_path).eos_token_ids == (5,)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 8], "pad_token_id": 8, "top_k": 20})
    )
    config = load_config(tmp_path)
    assert (config.eos_token_ids, config.bos_token_id, config.pad_token_id) == ((7, 8), 3, 8)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"model_type": "qwen3"}, "model_type is 'qwen3'"),
        ({"architectures": ["Qwen3MoeForSequenceClassification"]}, "architectures is"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"use_qk_norm": False}, "use_qk_norm is False"),
        ({"shared_expert_intermediate_size": 512}, "shared_expert_intermediate_size is 512"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config is {'quant_method': 'fp8'}"),
        ({"logit_softcap": 30.0}, "logit_softcap is 30.0; not supported"),
        ({"layer_types": ["full_attention"]}, "layer_types is ['full_attention']; not supported"),
        ({"dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'; want one of bfloat16"),
        ({"num_experts": 4}, "num_experts_per_tok is missing; want at most the number of experts = 4"),
        ({"num_experts": 64, "num_local_experts": 32}, "num_experts is 64; but num_local_experts is 32"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5; want a divisor of num_attention_heads = 32"),
        ({"head_dim": 15}, "head_dim is 15; want an even number"),
        ({"hidden_size": "2048", "head_dim": 128}, "hidden_size is '2048'; want an integer >= 1"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1; want true or false"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is 0.0; want a number > 0"),
        ({"mlp_only_layers": [24]}, "mlp_only_layers is [24]; want a list of layer indices in [0, 24)"),
        ({"eos_token_id": [1, 151936]}, "eos_token_id is [1, 151936]; want token ids in [0, 151936)"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window is 0; want an integer >= 1"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type is 'dynamic'; want one of default"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type is 'longrope'"),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type is 'proportional'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_parameters.factor is missing; want a number > 0"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "beta_fast": 8}}, "rope_scaling.beta_fast is 8"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope_parameters.partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"mrope_section": [1, 2]}}, "rope_parameters.mrope_section is [1, 2]; not supported"),
    ],
)
def test_unsupported_values_are_rejected_and_named(changes: dict[str, Any], problem: str) -> None:
    assert only_problem(**changes).startswith(problem)


def test_one_error_names_all_problems() -> None:
    found = problems(hidden_act="relu", num_key_value_heads=5, rope_scaling={"type": "longrope"}, moe_bias=True)
    assert [problem.split()[0] for problem in found] == [
        "hidden_act",
        "num_key_value_heads",
        "rope_scaling.type",
        "moe_bias",
    ]


def test_unknown_keys_that_are_off_are_accepted() -> None:
    assert parse_config(minimal(qkv_bias=False, quantization_config=None)) == parse_config(minimal())


@pytest.mark.parametrize("text", ["{", "[]", '"qwen3_moe"'])
def test_a_file_without_an_object_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        load_config(tmp_path)
