import json

import pytest

from gimbal_jax.serving.text.tokenizer import Tokenizer, load_tokenizer
from tests.serving.fake_server import write_model_folder


def loaded(folder):
    tokenizer = load_tokenizer(folder)
    assert isinstance(tokenizer, Tokenizer)
    return tokenizer


@pytest.fixture
def tokenizer(tmp_path):
    return loaded(write_model_folder(tmp_path))


def test_decode_inverts_encode(tokenizer):
    text = "Grüße, 世界 🙂"
    ids = tokenizer.encode(text)
    assert len(ids) == len(text.encode())
    assert tokenizer.decode(ids) == text


def test_special_token_is_one_id_and_not_decoded(tokenizer):
    ids = tokenizer.encode("<|start|>hi<|end|>")
    assert ids[0] == 256 and ids[-1] == 257
    assert tokenizer.decode(ids) == "hi"


def test_decoder_holds_back_unfinished_characters(tokenizer):
    decode = tokenizer.decoder()
    pieces = [decode([id]) for id in tokenizer.encode("a🙂b")]
    assert pieces == ["a", "", "", "", "🙂", "b"]
    assert decode(tokenizer.encode("cd<|end|>")) == "cd"
    assert tokenizer.decoder(skip_special_tokens=False)(tokenizer.encode("cd<|end|>")) == "cd<|end|>"


def test_chat_template_renders_without_html_escapes(tokenizer):
    messages = [{"role": "user", "content": "<hi> & 'bye'"}]
    assert tokenizer.render_chat(messages) == "<|start|>user: <hi> & 'bye'<|end|>\n<|start|>assistant:"
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(messages, add_generation_prompt=False) == "<|start|>user: <hi> & 'bye'<|end|>\n"


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{{ messages[0] | tojson }}", '{"role": "user", "content": "<ü>"}'),
        ("{{ eos_token }}{{ bos_token }}{% if tools %}tools{% endif %}", "<|end|>"),
        ("{% for m in messages %}{% break %}{% endfor %}x", "x"),
    ],
)
def test_template_has_the_environment_of_transformers(tmp_path, template, rendered):
    tokenizer = loaded(write_model_folder(tmp_path, chat_template=template))
    assert tokenizer.render_chat([{"role": "user", "content": "<ü>"}]) == rendered


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no system turn') }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ missing.field }}",
        "{{ messages[0].content + 1 }}",
        "{{ 1 / 0 }}",
    ],
)
def test_template_error_is_a_value_error(tmp_path, template):
    tokenizer = loaded(write_model_folder(tmp_path, chat_template=template))
    with pytest.raises(ValueError, match="chat template: "):
        tokenizer.render_chat([{"role": "system", "content": "x"}])


def test_template_file_overrides_the_config(tmp_path):
    write_model_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert loaded(tmp_path).render_chat([]) == "from the file"


def test_default_is_chosen_among_named_templates(tmp_path):
    write_model_folder(tmp_path)
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert loaded(tmp_path).render_chat([]) == "d"


def test_missing_files_mean_no_tokenizer_or_no_template(tmp_path):
    assert load_tokenizer(tmp_path) is None
    write_model_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = loaded(tmp_path)
    assert tokenizer.encode("a") and not tokenizer.has_chat_template
    with pytest.raises(ValueError, match="no chat template"):
        tokenizer.render_chat([])
