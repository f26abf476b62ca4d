"""A small Qwen3-MoE checkpoint whose routing is as skewed as a real model's, made from nothing.

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

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

_WORDS: dict[str, list[str]] = {
    topic: words.split() for topic, words in json.loads((files(__package__) / "demo_words.json").read_text()).items()
}
TOPICS = tuple(_WORDS)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

VOCAB = 1856
HIDDEN = 128
LAYERS = 4
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
EXPERTS = 64
EXPERTS_PER_TOKEN = 4
INTERMEDIATE = 64
MAX_POSITION = 4096

# Axes of the residual stream.
SHARED = 0
TOPIC = slice(1, 1 + len(TOPICS))
REST = slice(1 + len(TOPICS), HIDDEN)
REST_SIZE = HIDDEN - REST.start

# How the unit-RMS embedding of a word is split, as lengths in the three parts of the stream.
SHARED_LENGTH = 6.5
TOPIC_LENGTH = 5.5
REST_LENGTH = (HIDDEN - SHARED_LENGTH**2 - TOPIC_LENGTH**2) ** 0.5

# Standard deviations of the three terms of a router logit, chosen so that load is as skewed as measured on
# Qwen3-30B-A3B: hottest expert 5.5 times the mean on mixed text and 8 times on one topic.
POPULARITY = 0.65
PREFERENCE = 0.8
DIFFERENCE = 1.4

TOPIC_CARRIED = 0.15
"""Share of the context's mean topic that each attention layer adds to a token."""
ATTENTION_GAIN = 0.5
EXPERT_GAIN = 1.0
"""Sizes of the random parts, which read and write the rest of the stream only, so that the topic stays clear."""
TOPIC_LOGIT = 14.0
"""How much a word's topic raises the logits of that topic's words."""
WORD_LOGIT = 1.5
"""Standard deviation of the logits of one topic's words."""
REPEAT_LOGIT = 6.0
"""How much a word lowers its own logit."""
NON_WORD_LOGIT = -14.0
"""Logit of special tokens, bytes and parts of words: the model writes words of its topics, without end."""


def topic_prompt(topic: str, words: int, rng: np.random.Generator) -> str:
    """Random words of one topic, each after a space: as many tokens as words."""
    return "".join(f" {word}" for word in rng.choice(_WORDS[topic], words))


def write_demo_model(folder: Path, seed: int = 0) -> None:
    """Write the checkpoint in Hugging Face's format; the same bytes for the same seed."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    bfloat16 = {
        name: value.astype(ml_dtypes.bfloat16)
        for name, value in _weights(tokenizer, np.random.default_rng(seed)).items()
    }
    save_file(bfloat16, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(folder / "tokenizer.json"))
    _write_json(folder / "config.json", _config(ids))
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": ids["<|endoftext|>"],
            "do_sample": True,
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
        },
    )
    _write_json(
        folder / "tokenizer_config.json",
        {
            "add_bos_token": False,
            "add_prefix_space": False,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
            "eos_token": "<|im_end|>",
            "model_max_length": MAX_POSITION,
            "pad_token": "<|endoftext|>",
            "tokenizer_class": "PreTrainedTokenizerFast",
        },
    )


def _tokenizer() -> Tokenizer:
    """Byte-level BPE with a token for every word after a space."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f" {word}" for words in _WORDS.values() for word in words), trainer)
    return tokenizer


def _weights(tokenizer: Tokenizer, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """float32 tensors under their published names; matrices are [out, in]."""
    topic_V = np.full(VOCAB, -1)
    for topic, words in enumerate(_WORDS.values()):
        for word in words:
            (token,) = tokenizer.encode(f" {word}").ids
            topic_V[token] = topic
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
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights[f"{prefix}.input_layernorm.weight"] = ones_D
        weights[f"{prefix}.post_attention_layernorm.weight"] = ones_D
        weights |= {f"{prefix}.self_attn.{name}.weight": value for name, value in _attention(rng).items()}
        weights[f"{prefix}.mlp.gate.weight"] = _router(rng)
        for expert in range(EXPERTS):
            weights |= {f"{prefix}.mlp.experts.{expert}.{name}.weight": value for name, value in _expert(rng).items()}
    return weights


def _router(rng: np.random.Generator) -> np.ndarray:
    router_ED = np.zeros((EXPERTS, HIDDEN), np.float32)
    router_ED[:, SHARED] = _normal(rng, EXPERTS) * (POPULARITY / SHARED_LENGTH)
    router_ED[:, TOPIC] = _normal(rng, EXPERTS, len(TOPICS)) * (PREFERENCE / TOPIC_LENGTH)
    router_ED[:, REST] = _normal(rng, EXPERTS, REST_SIZE) * (DIFFERENCE / REST_LENGTH)
    return router_ED


def _attention(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random attention, of which the first dimensions of every head take the topic axes through."""
    value = np.zeros((KV_HEADS, HEAD_DIM, HIDDEN), np.float32)
    output = np.zeros((HIDDEN, HEADS, HEAD_DIM), np.float32)
    carried, free = slice(0, len(TOPICS)), slice(len(TOPICS), HEAD_DIM)
    value[:, carried, TOPIC] = np.eye(len(TOPICS))
    output[TOPIC, :, carried] = np.eye(len(TOPICS))[:, None, :] * (TOPIC_CARRIED / HEADS)
    value[:, free, REST] = _matrix(rng, KV_HEADS, HEAD_DIM - len(TOPICS), REST_SIZE)
    output[REST, :, free] = _matrix(rng, REST_SIZE, HEADS, HEAD_DIM - len(TOPICS)) * ATTENTION_GAIN
    return {
        "q_proj": _matrix(rng, HEADS * HEAD_DIM, HIDDEN),
        "k_proj": _matrix(rng, KV_HEADS * HEAD_DIM, HIDDEN),
        "v_proj": value.reshape(KV_HEADS * HEAD_DIM, HIDDEN),
        "o_proj": output.reshape(HIDDEN, HEADS * HEAD_DIM),
        "q_norm": np.ones(HEAD_DIM, np.float32),
        "k_norm": np.ones(HEAD_DIM, np.float32),
    }


def _expert(rng: np.random.Generator) -> dict[str, np.ndarray]:
    down = np.zeros((HIDDEN, INTERMEDIATE), np.float32)
    down[REST] = _matrix(rng, REST_SIZE, INTERMEDIATE) * EXPERT_GAIN
    return {
        "gate_proj": _matrix(rng, INTERMEDIATE, HIDDEN),
        "up_proj": _matrix(rng, INTERMEDIATE, HIDDEN),
        "down_proj": down,
    }


def _normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, np.float32)


def _matrix(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Normal numbers that keep the size of a unit-RMS input on the last axis."""
    return _normal(rng, *shape) / np.float32(shape[-1] ** 0.5)


def _config(ids: dict[str, int]) -> dict[str, Any]:
    """config.json with the keys of the published checkpoints (transformers 4)."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": ids["<|endoftext|>"],
        "decoder_sparse_step": 1,
        "eos_token_id": ids["<|im_end|>"],
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": MAX_POSITION,
        "max_window_layers": LAYERS,
        "mlp_only_layers": [],
        "model_type": "qwen3_moe",
        "moe_intermediate_size": INTERMEDIATE,
        "norm_topk_prob": True,
        "num_attention_heads": HEADS,
        "num_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS_PER_TOKEN,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
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
        "vocab_size": VOCAB,
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
