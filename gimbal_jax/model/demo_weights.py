"""Generated weights of a small Qwen3-MoE whose routing is as skewed as that of a real model.

The model has eight topics, each with its own words, and one token per word. The residual stream has one direction that
all tokens share and one direction for each topic. Its other directions distinguish tokens from each other. The router
row of an expert e in layer l is

    b[l, e] along the shared direction      popularity of the expert with all tokens
  + u[l, z, e] along the one of topic z     preference of topic z for the expert
  + random numbers along the others         so that tokens of one topic differ

with normal b and u. The routing of Qwen3-30B-A3B can be modelled in this form (ours). Attention carries the topic from
the context to each token, and the output favours words of that topic. So a sequence keeps its topic while it decodes.
The rest of attention and experts is random and small against the residual stream.
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

# The embedding of a word has RMS 1. These are its lengths in the three parts of the stream.
SHARED_LENGTH = 6.5
TOPIC_LENGTH = 5.5
REST_LENGTH = (HIDDEN - SHARED_LENGTH**2 - TOPIC_LENGTH**2) ** 0.5

# Standard deviations of the three terms of a router logit. With them the load is about as skewed as measured on
# Qwen3-30B-A3B. The hottest expert has 5 times the mean load on mixed text and 8 times on one topic. The max/mean load
# of 4 ranks with contiguous experts is 1.4 on one topic. Topics are nearly uncorrelated over all layers.
POPULARITY = 0.9
PREFERENCE = 0.75
DIFFERENCE = 1.4

TOPIC_CARRIED = 0.15
"""Share of the context's mean topic that each attention layer adds to a token."""
ATTENTION_GAIN = 0.5
"""Size of the random part of attention. It writes to ``REST`` only, which leaves the topic axes clean."""
EXPERT_GAIN = 1.0
"""Size of the experts' output, which is all random. It writes to ``REST`` only."""
TOPIC_LOGIT = 14.0
"""Logit that a word adds to all words of its topic."""
WORD_LOGIT = 1.5
"""Standard deviation of the logits of one topic's words."""
REPEAT_LOGIT = 6.0
"""Amount by which a word lowers its own logit."""
NON_WORD_LOGIT = -14.0
"""Logit of special tokens, bytes and parts of words. The model writes words only, and never ends a text."""


def demo_weights(topic_V: np.ndarray, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return float32 tensors under their published names; matrices are [out, in].

    Args:
      topic_V: topic of each token that is a word, and -1 for the other tokens.
      rng: source of all random numbers.
    """
    is_word_V = topic_V >= 0

    # Embedding: the shared direction, the topic's direction, and random numbers that distinguish tokens.
    embedding_VD = np.zeros((VOCAB, HIDDEN), np.float32)
    embedding_VD[:, SHARED] = SHARED_LENGTH
    embedding_VD[is_word_V, TOPIC.start + topic_V[is_word_V]] = TOPIC_LENGTH
    embedding_VD[:, REST] = _normal(rng, VOCAB, REST_SIZE) * (REST_LENGTH / REST_SIZE**0.5)
    # Output head: raise the words of the topic in the stream, lower the last token itself, and exclude non-words.
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
    """Return router weights of all layers, [layers, experts, hidden]."""
    popularity_LE = _normal(rng, LAYERS, EXPERTS)
    # Popularity sums to 0 over the layers for each expert number, so that topics hardly correlate over all layers.
    popularity_LE -= popularity_LE.mean(0)
    router_LED = np.zeros((LAYERS, EXPERTS, HIDDEN), np.float32)
    router_LED[..., SHARED] = popularity_LE * (POPULARITY / popularity_LE.std() / SHARED_LENGTH)
    router_LED[..., TOPIC] = _normal(rng, LAYERS, EXPERTS, TOPIC_COUNT) * (PREFERENCE / TOPIC_LENGTH)
    router_LED[..., REST] = _normal(rng, LAYERS, EXPERTS, REST_SIZE) * (DIFFERENCE / REST_LENGTH)
    return router_LED


def _attention(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Return random attention weights, except that the first dimensions of each head copy the topic axes.

    K is KV heads, N heads and H the dimensions of a head.
    """
    value_KHD = np.zeros((KV_HEADS, HEAD_DIM, HIDDEN), np.float32)
    output_DNH = np.zeros((HIDDEN, HEADS, HEAD_DIM), np.float32)
    # Dimensions of a head that carry the topic, and those that are random.
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
    """Return one random expert, which writes to ``REST`` only."""
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
    """Return normal numbers that map a unit-RMS input on the last axis to a unit-RMS output."""
    return _normal(rng, *shape) / np.float32(shape[-1] ** 0.5)
