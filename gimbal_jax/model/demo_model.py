"""A small generated Qwen3-MoE checkpoint in Hugging Face's format, whose vocabulary has topics as real text does.

``demo_weights`` makes the weights and explains their routing.
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from gimbal_jax.model.demo_weights import (
    EXPERTS,
    EXPERTS_PER_TOKEN,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    INTERMEDIATE,
    KV_HEADS,
    LAYERS,
    VOCAB,
    demo_weights,
)

_WORDS: dict[str, list[str]] = {
    topic: words.split() for topic, words in json.loads((files(__package__) / "demo_words.json").read_text()).items()
}
TOPICS = tuple(_WORDS)
"""Names of the topics."""
MAX_POSITION = 4096
"""Longest sequence, in tokens."""

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)


def topic_prompt(topic: str, words: int, rng: np.random.Generator) -> str:
    """Return random words of one topic, each after a space. The demo tokenizer makes one token of each word."""
    return "".join(f" {word}" for word in rng.choice(_WORDS[topic], words))


def write_demo_model(folder: Path, seed: int = 0) -> None:
    """Write weights, tokenizer and configuration of the demo model to a folder. Equal seeds give equal bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    ids = {token: tokenizer.get_vocab()[token] for token in SPECIAL_TOKENS}
    # The real checkpoints are published in bfloat16.
    bfloat16 = {
        name: value.astype(ml_dtypes.bfloat16)
        for name, value in demo_weights(_topics(tokenizer), np.random.default_rng(seed)).items()
    }
    (folder / "model.safetensors").write_bytes(save(bfloat16, metadata={"format": "pt"}))
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
    """Train a byte-level BPE tokenizer that has one token for each word with a space before it."""
    tokenizer = Tokenizer(models.BPE())
    # No space is added at the start of a text, so that decoding gives back exactly the text that was encoded.
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # The vocabulary is large enough, and the minimum frequency low enough, to merge each word into one token.
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        min_frequency=1,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=list(SPECIAL_TOKENS),
        show_progress=False,
    )
    tokenizer.train_from_iterator((f" {word}" for words in _WORDS.values() for word in words), trainer)
    return tokenizer


def _topics(tokenizer: Tokenizer) -> np.ndarray:
    """Return the topic of each token that is a word and -1 for the other tokens, [vocabulary]."""
    topic_V = np.full(VOCAB, -1)
    for topic, words in enumerate(_WORDS.values()):
        for word in words:
            (token,) = tokenizer.encode(f" {word}").ids
            topic_V[token] = topic
    return topic_V


def _config(ids: dict[str, int]) -> dict[str, Any]:
    """Return config.json with the keys of the published checkpoints (transformers 4)."""
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
