#!/usr/bin/env python3
"""Write tiny Qwen3-MoE checkpoints and the results of Hugging Face transformers for them.

Runs in an environment of its own (torch for CPU, transformers 5.24, safetensors):

    python scripts/make_goldens.py tests/goldens

Each case is a folder. It has a checkpoint as ``save_pretrained`` writes it, in
float32 and with the published tensor names, and ``golden.npz``:

    prompt_T          prompt token ids
    logits_TV         logits at every prompt position
    tokens_N          the N tokens that greedy decoding appends
    decode_logits_NV  the logits from which each of them was chosen

A case uses the first seed for which rounding decides neither a greedy token nor a
choice of experts, so that token identity is a fair test. The decoded tokens also
have to differ enough from each other.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.utils.logging import disable_progress_bar

PROMPT_LENGTH = 40
DECODE_STEPS = 32
LOGIT_MARGIN = 1e-3
"""Minimum difference between the two highest logits of a decode step."""
ROUTER_MARGIN = 1e-4
"""Minimum difference between the probabilities of the last chosen expert and the next one."""
DIFFERENT_TOKENS = 8
"""Minimum number of different decoded tokens. A model that repeats itself tests little."""
SHARD_SIZE = {"no_norm_topk": "100KB"}
"""Case -> maximum size of a checkpoint file. These cases are written as several files with an index."""
TRANSFORMERS_4 = {"v4_config"}
"""Cases whose config.json has the keys of transformers 4."""

SHAPE: dict[str, Any] = dict(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    num_experts=8,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    max_position_embeddings=256,
    norm_topk_prob=True,
    rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
)


def scaled_rope(kind: str, **parameters: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **parameters}}


CASES: dict[str, dict[str, Any]] = {
    "base": {},
    "no_norm_topk": {"norm_topk_prob": False},
    "sparse_step": {"num_hidden_layers": 4, "decoder_sparse_step": 2},
    "mlp_only": {"mlp_only_layers": [1]},
    "tied": {"tie_word_embeddings": True},
    "attention_bias": {"attention_bias": True},
    # The trained length is shorter than the prompt, so that scaling has an effect.
    "yarn": scaled_rope("yarn", factor=8.0, original_max_position_embeddings=32),
    "linear_rope": scaled_rope("linear", factor=4.0),
    "llama3_rope": scaled_rope(
        "llama3", factor=8.0, original_max_position_embeddings=32, low_freq_factor=1.0, high_freq_factor=4.0
    ),
    "sliding_window": {"use_sliding_window": True, "sliding_window": 16},
    "kv1": {"num_key_value_heads": 1},
    "v4_config": scaled_rope("linear", factor=2.0),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder that gets one folder per case")
    out = parser.parse_args().out
    disable_progress_bar()
    for name, changes in CASES.items():
        seed = next(seed for seed in range(1000) if write_case(out / name, Qwen3MoeConfig(**SHAPE | changes), seed))
        print(f"{name}: seed {seed}")


def write_case(folder: Path, config: Qwen3MoeConfig, seed: int) -> bool:
    """Write one case. Return False if its decoded tokens are no fair test."""
    shutil.rmtree(folder, ignore_errors=True)
    generator = torch.Generator().manual_seed(seed)
    model = Qwen3MoeForCausalLM(config)
    fill(model, generator)
    model.save_pretrained(folder, max_shard_size=SHARD_SIZE.get(folder.name, "5GB"))
    if folder.name in TRANSFORMERS_4:
        path = folder / "config.json"
        path.write_text(json.dumps(in_transformers_4_form(json.loads(path.read_text())), indent=2) + "\n")
    check_expert_names(folder, config)

    # Compute with the checkpoint as written, so read it back.
    model = Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    prompt_T = torch.randint(config.vocab_size, (PROMPT_LENGTH,), generator=generator)
    golden = greedy(model, prompt_T)
    if golden is None:
        return False
    np.savez_compressed(folder / "golden.npz", **golden)
    return True


@torch.no_grad()
def fill(model: Qwen3MoeForCausalLM, generator: torch.Generator) -> None:
    """Set random weights whose scale lets attention, experts, norms and biases all affect the residual stream."""
    for name, parameter in model.named_parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if "norm" in name:
            parameter.copy_(1 + 0.1 * noise)
        elif name.endswith("bias"):
            parameter.copy_(0.1 * noise)
        else:  # [..., out, in], and the embeddings as if they were tied to the output
            parameter.copy_(noise / parameter.shape[-1] ** 0.5)


@torch.no_grad()
def greedy(model: Qwen3MoeForCausalLM, prompt_T: torch.Tensor) -> dict[str, np.ndarray] | None:
    """Return the arrays of ``golden.npz``, by a forward pass over all tokens per step; None without a fair test."""
    tokens = prompt_T
    for _ in range(DECODE_STEPS):
        tokens = torch.cat([tokens, model(tokens[None]).logits[0, -1].argmax()[None]])
    output = model(tokens[None], output_router_logits=True)
    logits = output.logits[0]
    decode_logits_NV = logits[PROMPT_LENGTH - 1 : -1]
    if not torch.equal(decode_logits_NV.argmax(-1), tokens[PROMPT_LENGTH:]):
        return None
    if margin(decode_logits_NV, 1) < LOGIT_MARGIN or len(tokens[PROMPT_LENGTH:].unique()) < DIFFERENT_TOKENS:
        return None
    if any(
        margin(router.softmax(-1), model.config.num_experts_per_tok) < ROUTER_MARGIN for router in output.router_logits
    ):
        return None
    return {
        "prompt_T": prompt_T.numpy().astype(np.int32),
        "logits_TV": logits[:PROMPT_LENGTH].numpy(),
        "tokens_N": tokens[PROMPT_LENGTH:].numpy().astype(np.int32),
        "decode_logits_NV": decode_logits_NV.numpy(),
    }


def margin(values: torch.Tensor, chosen: int) -> float:
    """Return the minimum, over the rows, of the difference between the ``chosen``-th highest value and the next one."""
    top = values.topk(chosen + 1).values
    return (top[:, chosen - 1] - top[:, chosen]).min().item()


def in_transformers_4_form(config: dict[str, Any]) -> dict[str, Any]:
    """Return a config with the keys of transformers 4, and the older ``type`` for the kind of rope scaling."""
    config = dict(config)
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    config["num_experts"] = config.pop("num_local_experts")
    config["torch_dtype"] = config.pop("dtype")
    config["transformers_version"] = "4.51.0"
    return dict(sorted(config.items()))


def check_expert_names(folder: Path, config: Qwen3MoeConfig) -> None:
    """Check that the files have one tensor per expert and projection, as published. Raises SystemExit if not.

    In memory, transformers may stack the experts.
    """
    found: set[str] = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "numpy") as file:
            found.update(file.keys())
    layers = {int(name.split(".")[2]) for name in found if name.endswith("mlp.gate.weight")}
    wanted = {
        f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
        for layer in layers
        for expert in range(config.num_experts)
        for projection in ("gate", "up", "down")
    }
    if {name for name in found if ".experts." in name} != wanted:
        raise SystemExit(f"{folder}: expert tensors must have the published names. Use another version of transformers")


if __name__ == "__main__":
    main()
