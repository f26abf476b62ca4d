"""The demo checkpoint is complete, deterministic and in Hugging Face's format."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import jinja2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from tokenizers import Tokenizer

from gimbal_jax.model.demo_model import SPECIAL_TOKENS, TOPICS, topic_prompt, write_demo_model
from gimbal_jax.model.demo_weights import TOPIC_COUNT
from gimbal_jax.model.hf_config import load_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "model"
    write_demo_model(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_another_process_writes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    code = "from sys import argv; from pathlib import Path; from gimbal_jax.model import demo_model as demo"
    code += "; demo.write_demo_model(Path(argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    assert digests(tmp_path) == digests(folder)


def test_another_seed_gives_other_weights_under_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    write_demo_model(tmp_path, seed=1)
    differing = {name for name, digest in digests(folder).items() if digests(tmp_path)[name] != digest}
    assert differing == {"model.safetensors"}


def test_config_is_a_small_qwen3_moe(folder: Path, tokenizer: Tokenizer) -> None:
    config = load_config(folder)
    assert (config.num_layers, config.hidden_size, config.num_experts, config.experts_per_token) == (4, 128, 64, 4)
    assert config.moe_layers == (0, 1, 2, 3)
    assert len(TOPICS) == TOPIC_COUNT
    assert config.norm_topk_prob and not config.tie_embeddings
    assert config.vocab_size % 8 == 0 and config.vocab_size >= tokenizer.get_vocab_size()
    assert config.eos_token_ids == (tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>"))


def test_tensors_have_the_published_names_and_shapes(folder: Path) -> None:
    c = load_config(folder)
    heads, kv_heads = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    wanted = {
        "model.embed_tokens.weight": [c.vocab_size, c.hidden_size],
        "model.norm.weight": [c.hidden_size],
        "lm_head.weight": [c.vocab_size, c.hidden_size],
    }
    for layer in range(c.num_layers):
        wanted |= {
            f"model.layers.{layer}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": [c.hidden_size],
                "post_attention_layernorm": [c.hidden_size],
                "self_attn.q_proj": [heads, c.hidden_size],
                "self_attn.k_proj": [kv_heads, c.hidden_size],
                "self_attn.v_proj": [kv_heads, c.hidden_size],
                "self_attn.o_proj": [c.hidden_size, heads],
                "self_attn.q_norm": [c.head_dim],
                "self_attn.k_norm": [c.head_dim],
                "mlp.gate": [c.num_experts, c.hidden_size],
            }.items()
        }
        for expert in range(c.num_experts):
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            wanted[f"{prefix}.gate_proj.weight"] = [c.moe_intermediate_size, c.hidden_size]
            wanted[f"{prefix}.up_proj.weight"] = [c.moe_intermediate_size, c.hidden_size]
            wanted[f"{prefix}.down_proj.weight"] = [c.hidden_size, c.moe_intermediate_size]
    with safe_open(folder / "model.safetensors", "numpy") as file:
        found = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118, it is no dict
        assert {name: view.get_shape() for name, view in found.items()} == wanted
        assert {view.get_dtype() for view in found.values()} == {"BF16"}


@pytest.mark.parametrize("topic", TOPICS)
def test_a_prompt_has_as_many_tokens_as_words_all_of_its_topic(topic: str, tokenizer: Tokenizer) -> None:
    text = topic_prompt(topic, 500, np.random.default_rng(0))
    ids = tokenizer.encode(text).ids
    assert len(ids) == len(text.split()) == 500
    others = "".join(topic_prompt(other, 2000, np.random.default_rng(1)) for other in TOPICS if other != topic)
    assert not set(ids) & set(tokenizer.encode(others).ids)


def test_prompts_depend_only_on_the_generator() -> None:
    first, same, other = (topic_prompt("music", 20, np.random.default_rng(seed)) for seed in (0, 0, 1))
    assert first == same != other


@given(text=st.text())
def test_the_tokenizer_decodes_to_the_encoded_text(text: str, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_template_is_chatml(folder: Path, tokenizer: Tokenizer) -> None:
    template = json.loads((folder / "tokenizer_config.json").read_text())["chat_template"]
    messages = [{"role": "user", "content": "violin solo"}]
    text = jinja2.Template(template).render(messages=messages, add_generation_prompt=True)
    assert text == "<|im_start|>user\nviolin solo<|im_end|>\n<|im_start|>assistant\n"
    special = {tokenizer.token_to_id(token): token for token in SPECIAL_TOKENS}
    found = [special[id] for id in tokenizer.encode(text).ids if id in special]
    assert found == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
