"""Weights of a small Qwen3-MoE whose routing is as skewed as a real model's, made from nothing.

The model speaks of eight topics, each with words of its own, one token a word. The
residual stream has one direction that all tokens share, one for each topic, and the
rest for what tells tokens apart. In every MoE layer an expert's router row is

    b[l, e] along the shared direction   how popular the expert is with everyone
  + u[l, z, e] along that of topic z     how much topic z prefers it
  + random numbers along the rest        so that tokens of one topic differ

with normal b and u: the form in which the routing of Qwen3-30B-A3B can be modelled
(ours). Attention carries the topic from the context to every token, and the output
favours words of the topic, so that a sequence keeps its topic while it decodes.
Attention and experts are random otherwise, and small against the residual stream.
"""

from __future__ import annotations

import numpy as np

VOCAB = 1856
TOPIC_COUNT = 8
HIDDEN = 128
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
EXPERTS = 64
EXPERTS_PER_TOKEN = 4
INTERMEDIATE = 64

# Axes of the residual stream.
SHARED = 0
TOPIC = slice(1, 1 + TOPIC_COUNT)
REST = slice(1 + TOPIC_COUNT, HIDDEN)
REST_SIZE = HIDDEN - REST.start

# The embedding of a word has RMS 1; these are its lengths in the three parts of the stream.
SHARED_LENGTH = 6.5
TOPIC_LENGTH = 5.5
REST_LENGTH = (HIDDEN - SHARED_LENGTH**2 - TOPIC_LENGTH**2) ** 0.5

# Standard deviations of the three terms of a router logit. With these the load is about as skewed as measured on
# Qwen3-30B-A3B: hottest expert 5 times the mean on mixed text and 8 times on one topic; max/mean load of 4 ranks
# with contiguous experts 1.4 on one topic; topics nearly uncorrelated over all layers.
POPULARITY = 0.9
PREFERENCE = 0.75
DIFFERENCE = 1.4

TOPIC_CARRIED = 0.15
"""Share of the context's mean topic that each attention layer adds to a token."""
ATTENTION_GAIN = 0.5
EXPERT_GAIN = 1.0
"""Sizes of the random parts. They write to the rest of the stream only, so that the topic stays clear."""
TOPIC_LOGIT = 14.0
"""How much a word's topic raises the logits of that topic's words."""
WORD_LOGIT = 1.5
"""Standard deviation of the logits of one topic's words."""
REPEAT_LOGIT = 6.0
"""How much a word lowers its own logit."""
NON_WORD_LOGIT = -14.0
"""Logit of special tokens, bytes and parts of words: the model writes words of its topics, without end."""


def demo_weights(topic_V: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """float32 tensors under their published names; matrices are [out, in].

    ``topic_V`` is the topic of each token that is a word, and -1 of the others.
    """
    is_word_V = topic_V >= 0

    embedding_VD = np.zeros((VOCAB, HIDDEN), np.float32)
    embedding_VD[:, SHARED] = SHARED_LENGTH
    embedding_VD[is_word_V, TOPIC.start + topic_V[is_word_V]] = TOPIC_LENGTH
    embedding_VD[:, REST] = _normal(rng, VOCAB, REST_SIZE) * (REST_LENGTH / REST_SIZE**0.5)
    head_VD = np.zeros((VOCAB, HIDDEN), np.float32)
    head_VD[is_word_V, TOPIC.start + topic_V[is_word_V]] = TOPIC_LOGIT / TOPIC_LENGTH
    head_VD[:, REST] = _normal(rng, VOCAB, REST_SIZE) * (WORD_LOGIT / REST_LENGTH)
    head_VD[:, REST] -= embedding_VD[:, REST] * (REPEAT_LOGIT / REST_LENGTH**2)
    head_VD[~is_word_V, SHARED] = NON_WORD_LOGIT / SHARED_LENGTH

    ones_D = np.ones(HIDDEN, np.float32)
    weights = {
        "model.embed_tokens.weight": embedding_VD,
        "model.norm.weight": ones_D,
        "lm_head.weight": head_VD,
    }
    for layer, router_ED in enumerate(_routers(rng)):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = ones_D
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones_D
        weights |= {f"{prefix}.self_attn.{name}.weight": value for name, value in _attention(rng).items()}
        weights[f"{prefix}.mlp.gate.weight"] = router_ED
        for expert in range(EXPERTS):
            weights |= {f"{prefix}.mlp.experts.{expert}.{name}.weight": value for name, value in _expert(rng).items()}
    return weights


def _routers(rng: np.random.Generator) -> np.ndarray:
    """Router weights of all layers, [layers, experts, hidden]."""
    popularity_LE = _normal(rng, LAYERS, EXPERTS)
    # An expert number that is popular in one layer is not in another: over all layers topics hardly correlate.
    popularity_LE -= popularity_LE.mean(0)
    router_LED = np.zeros((LAYERS, EXPERTS, HIDDEN), np.float32)
    router_LED[..., SHARED] = popularity_LE * (POPULARITY / popularity_LE.std() / SHARED_LENGTH)
    router_LED[..., TOPIC] = _normal(rng, LAYERS, EXPERTS, TOPIC_COUNT) * (PREFERENCE / TOPIC_LENGTH)
    router_LED[..., REST] = _normal(rng, LAYERS, EXPERTS, REST_SIZE) * (DIFFERENCE / REST_LENGTH)
    return router_LED


def _attention(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random attention, of which the first dimensions of every head take the topic axes through.

    K KV heads and N heads of H dimensions.
    """
    value_KHD = np.zeros((KV_HEADS, HEAD_DIM, HIDDEN), np.float32)
    output_DNH = np.zeros((HIDDEN, HEADS, HEAD_DIM), np.float32)
    carried, free = slice(0, TOPIC_COUNT), slice(TOPIC_COUNT, HEAD_DIM)
    value_KHD[:, carried, TOPIC] = np.eye(TOPIC_COUNT)
    output_DNH[TOPIC, :, carried] = np.eye(TOPIC_COUNT)[:, None, :] * (TOPIC_CARRIED / HEADS)
    value_KHD[:, free, REST] = _matrix(rng, KV_HEADS, HEAD_DIM - TOPIC_COUNT, REST_SIZE)
    output_DNH[REST, :, free] = _matrix(rng, REST_SIZE, HEADS, HEAD_DIM - TOPIC_COUNT) * ATTENTION_GAIN
    return {
        "q_proj": _matrix(rng, HEADS * HEAD_DIM, HIDDEN),
        "k_proj": _matrix(rng, KV_HEADS * HEAD_DIM, HIDDEN),
        "v_proj": value_KHD.reshape(KV_HEADS * HEAD_DIM, HIDDEN),
        "o_proj": output_DNH.reshape(HIDDEN, HEADS * HEAD_DIM),
        "q_norm": np.ones(HEAD_DIM, np.float32),
        "k_norm": np.ones(HEAD_DIM, np.float32),
    }


def _expert(rng: np.random.Generator) -> dict[str, np.ndarray]:
    down_DI = np.zeros((HIDDEN, INTERMEDIATE), np.float32)
    down_DI[REST] = _matrix(rng, REST_SIZE, INTERMEDIATE) * EXPERT_GAIN
    return {
        "gate_proj": _matrix(rng, INTERMEDIATE, HIDDEN),
        "up_proj": _matrix(rng, INTERMEDIATE, HIDDEN),
        "down_proj": down_DI,
    }


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def _matrix(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers that keep the size of a unit-RMS input on the last axis."""
    return _normal(rng, *shape) / np.float32(shape[-1] ** 0.5)
