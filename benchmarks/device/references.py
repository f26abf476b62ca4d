"""References of the kernels, in numpy and float64."""

from __future__ import annotations

import numpy as np


def route_reference(
    logits_TE: np.ndarray, valid_T: np.ndarray, slot_of_expert_E: np.ndarray, k: int, renormalise: bool, ranks: int
) -> dict[str, np.ndarray]:
    """Return the fields of ``Routing`` by name."""
    tokens, experts = logits_TE.shape
    logits_TE = np.where(np.isnan(logits_TE), -np.inf, logits_TE.astype(np.float64))
    expert_Tk = np.argsort(-logits_TE, axis=1, kind="stable")[:, :k]  # ties keep the lower id first
    top_T1 = logits_TE.max(axis=1, keepdims=True)
    share_TE = np.exp(logits_TE - np.where(np.isfinite(top_T1), top_T1, 0.0))
    weight_Tk = np.take_along_axis(share_TE, expert_Tk, axis=1)
    divisor_T1 = (weight_Tk if renormalise else share_TE).sum(axis=1, keepdims=True)
    weight_Tk = np.where(valid_T[:, None], weight_Tk / np.where(divisor_T1 > 0, divisor_T1, 1.0), 0.0)
    slot_Tk = np.where(valid_T[:, None], slot_of_expert_E[expert_Tk], -1)

    chosen_TP = (slot_Tk[..., None] == np.arange(experts)).any(axis=1)
    sent_TR = chosen_TP.reshape(tokens, ranks, -1).any(axis=2)
    earlier_TP, earlier_TR = (marked.cumsum(axis=0) - marked for marked in (chosen_TP, sent_TR))
    position_Tk = np.take_along_axis(earlier_TP, np.maximum(slot_Tk, 0), axis=1)
    return {
        "slot_Tk": slot_Tk,
        "weight_Tk": weight_Tk,
        "count_E": chosen_TP.sum(axis=0)[slot_of_expert_E],
        "position_Tk": np.where(valid_T[:, None], position_Tk, 0),
        "send_R": sent_TR.sum(axis=0),
        "place_TR": np.where(sent_TR, earlier_TR, -1),
    }


def ffn_reference(
    x_ND: np.ndarray, slot_Nk: np.ndarray, weight_Nk: np.ndarray, gate_up_PDF: np.ndarray, down_PFD: np.ndarray
) -> np.ndarray:
    """Return the weighted sum of the chosen slots' SwiGLU, [N, D]; slot -1 means no slot."""
    y_ND = np.zeros(x_ND.shape)
    for slot in range(len(gate_up_PDF)):
        token_n, choice_n = np.nonzero(slot_Nk == slot)
        gate_up = x_ND[token_n].astype(np.float64) @ gate_up_PDF[slot].astype(np.float64)
        gate, up = np.split(gate_up, 2, axis=1)
        y = (gate / (1 + np.exp(-gate)) * up) @ down_PFD[slot].astype(np.float64)
        y_ND[token_n] += (
            weight_Nk[token_n, choice_n, None] * y
        )  # a token has a slot at most once, so indices are unique
    return y_ND


def attention_reference(q_QHD: np.ndarray, k_CKD: np.ndarray, v_CKD: np.ndarray, start: int) -> np.ndarray:
    """Return the causal attention of one sequence's tokens from position ``start`` on, [Q, H, D]."""
    queries, heads, dim = q_QHD.shape
    kv_heads = k_CKD.shape[1]
    q = q_QHD.astype(np.float64).reshape(queries, kv_heads, heads // kv_heads, dim)
    k, v = k_CKD.astype(np.float64), v_CKD.astype(np.float64)
    # Matrix products by KV head: numpy has no fast einsum for this.
    score = np.matmul(q.transpose(1, 2, 0, 3).reshape(kv_heads, -1, dim), k.transpose(1, 2, 0)) / dim**0.5
    score = score.reshape(kv_heads, -1, queries, len(k))
    seen_QC = np.arange(len(k)) <= start + np.arange(queries)[:, None]
    score = np.where(seen_QC, score, -np.inf)
    share = np.exp(score - score.max(axis=-1, keepdims=True))
    share /= share.sum(axis=-1, keepdims=True)
    out = np.matmul(share.reshape(kv_heads, -1, len(k)), v.transpose(1, 0, 2))
    return out.reshape(kv_heads, -1, queries, dim).transpose(2, 0, 1, 3).reshape(queries, heads, dim)


def places_of(slot_Nk: np.ndarray, slots: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the place of each pair in the order by slot (-1 without a slot), and the number of pairs of each slot."""
    flat_n = slot_Nk.reshape(-1)
    order_n = np.argsort(np.where(flat_n >= 0, flat_n, slots), kind="stable")
    place_n = np.empty(flat_n.size, np.int32)
    place_n[order_n] = np.arange(flat_n.size)
    place_n[flat_n < 0] = -1
    return place_n.reshape(slot_Nk.shape), np.bincount(flat_n[flat_n >= 0], minlength=slots).astype(np.int32)
