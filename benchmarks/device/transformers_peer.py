"""Time the decode steps of Hugging Face transformers, on the same GPU in the same run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from benchmarks.device.parts import AbsentError, Result
from benchmarks.device.setting import Setting
from benchmarks.device.timing import timing
from gimbal_jax.config import ModelConfig


def transformers_speed(setting: Setting) -> Iterator[Result]:
    """Time eager ``Qwen3MoeForCausalLM`` in bfloat16 with random weights and its default cache and kernels."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise AbsentError(f"{error.name} is not installed") from error
    if setting.backend == "mosaic" and not torch.cuda.is_available():
        raise AbsentError("torch sees no CUDA device")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, ours = setting.sizes, setting.found.get("model_speed", {})
    layers = ours.get("model", {}).get("layers", sizes.model.num_layers)  # as many as model_speed ran

    torch.manual_seed(setting.seed)
    with torch.device(device), torch.inference_mode():
        config = transformers.Qwen3MoeConfig(**arguments_of(sizes.model, layers))
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        yield (
            "model",
            {
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "layers": config.num_hidden_layers,
                "experts_implementation": str(getattr(config, "_experts_implementation", "unknown")),
                "attention_implementation": str(config._attn_implementation),
            },
        )
        for batch in sizes.batches:
            # All rows share one prompt. The time of a step depends on lengths and on the new tokens, which differ.
            prompt = torch.randint(config.vocab_size, (1, sizes.context - 1))
            cache = model(prompt, use_cache=True, logits_to_keep=1).past_key_values
            cache.batch_repeat_interleave(batch)
            tokens = torch.randint(config.vocab_size, (batch, 1))
            name, step = f"decode {batch}", time_steps(torch, model, cache, tokens, sizes.samples)
            our_us = ours.get(name, {}).get("step", {}).get("median_us")
            yield name, {"step": step, "over_ours": step["median_us"] / our_us if our_us else None}
            del cache


def time_steps(torch: Any, model: Any, cache: Any, tokens: Any, samples: int) -> dict[str, float]:
    """Time steps from tokens on the device to the next tokens on the host. The context grows by one token a step."""
    seconds = []
    for sample in range(-2, samples):  # the first two samples warm up
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        model(tokens, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1).cpu()
        if sample >= 0:
            seconds.append(time.perf_counter() - began)
    return timing(seconds)


def arguments_of(model: ModelConfig, layers: int) -> dict[str, Any]:
    """Return the arguments of ``Qwen3MoeConfig`` for a model with experts in all layers."""
    return {
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.moe_intermediate_size,
        "norm_topk_prob": model.norm_topk_prob,
        "max_position_embeddings": model.max_position,
    }
