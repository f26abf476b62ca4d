"""Qwen3-MoE's routing in float64 numpy, straight from the checkpoint: no batch, no pages, no placement."""

from __future__ import annotations

import numpy as np
from safetensors.numpy import load_file

from gimbal_jax.config import ModelConfig
from tests.e2e.rig import FOLDER, MODEL

WEIGHTS = {name: array.astype(np.float64) for name, array in load_file(FOLDER / "model.safetensors").items()}


def routes(tokens: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Whether each token chooses each expert [T, L, E], and by how much the last choice beat the next logit [T, L]."""
    hidden_TD = WEIGHTS["model.embed_tokens.weight"][list(tokens)]
    chosen, margins = [], []
    for layer in range(MODEL.num_layers):
        w = {name: WEIGHTS[f"model.layers.{layer}.{name}.weight"] for name in _names(MODEL)}
        hidden_TD = hidden_TD + _attention(_norm(hidden_TD, w["input_layernorm"]), w)
        x_TD = _norm(hidden_TD, w["post_attention_layernorm"])
        logits_TE = x_TD @ w["mlp.gate"].T
        order_TE = np.argsort(-logits_TE, axis=1, kind="stable")
        chosen_TE = np.zeros(logits_TE.shape, bool)
        np.put_along_axis(chosen_TE, order_TE[:, : MODEL.experts_per_token], True, axis=1)
        weight_TE = np.where(chosen_TE, np.exp(logits_TE - logits_TE.max(axis=1, keepdims=True)), 0.0)
        weight_TE /= weight_TE.sum(axis=1, keepdims=True)
        for expert in range(MODEL.num_experts):
            gate, up, down = (w[f"mlp.experts.{expert}.{part}_proj"] for part in ("gate", "up", "down"))
            gate_TF = x_TD @ gate.T
            y_TD = (gate_TF / (1 + np.exp(-gate_TF)) * (x_TD @ up.T)) @ down.T
            hidden_TD = hidden_TD + weight_TE[:, expert, None] * y_TD
        sorted_TE = np.take_along_axis(logits_TE, order_TE, axis=1)
        chosen.append(chosen_TE)
        margins.append(sorted_TE[:, MODEL.experts_per_token - 1] - sorted_TE[:, MODEL.experts_per_token])
    return np.stack(chosen, axis=1), np.stack(margins, axis=1)


def _names(model: ModelConfig) -> list[str]:
    attention = [f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
    experts = [
        f"mlp.experts.{expert}.{part}_proj" for expert in range(model.num_experts) for part in ("gate", "up", "down")
    ]
    return ["input_layernorm", "post_attention_layernorm", "mlp.gate", *attention, *experts]


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + MODEL.rms_norm_eps) * weight


def _attention(x_TD: np.ndarray, w: dict[str, np.ndarray]) -> np.ndarray:
    tokens, heads_per_kv = len(x_TD), MODEL.num_heads // MODEL.num_kv_heads

    def heads(name: str) -> np.ndarray:
        return (x_TD @ w[f"self_attn.{name}_proj"].T).reshape(tokens, -1, MODEL.head_dim)

    q_THK = _rope(_norm(heads("q"), w["self_attn.q_norm"]))
    k_THK = np.repeat(_rope(_norm(heads("k"), w["self_attn.k_norm"])), heads_per_kv, axis=1)
    v_THK = np.repeat(heads("v"), heads_per_kv, axis=1)
    scores_HTT = np.einsum("thk,uhk->htu", q_THK, k_THK) / np.sqrt(MODEL.head_dim)
    scores_HTT[:, ~np.tri(tokens, dtype=bool)] = -np.inf
    share_HTT = np.exp(scores_HTT - scores_HTT.max(axis=2, keepdims=True))
    share_HTT /= share_HTT.sum(axis=2, keepdims=True)
    return np.einsum("htu,uhk->thk", share_HTT, v_THK).reshape(tokens, -1) @ w["self_attn.o_proj"].T


def _rope(x_THK: np.ndarray) -> np.ndarray:
    half = MODEL.head_dim // 2
    angle_T1K = np.arange(len(x_THK))[:, None, None] * MODEL.rope.theta ** -(np.arange(half) / half)
    a, b = x_THK[..., :half], x_THK[..., half:]
    cos, sin = np.cos(angle_T1K), np.sin(angle_T1K)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
