"""Text to token ids and back, and chat messages to text, from a checkpoint's own files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Tokenizer:
    """Built from the contents of the files named in ``FILES``, of which only the first must be there."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self.json = files["tokenizer.json"]
        """What it was made from, for libraries that read it themselves."""
        self._tokenizer = tokenizers.Tokenizer.from_str(self.json)
        config = json.loads(files.get("tokenizer_config.json", "{}"))
        template = files.get("chat_template.jinja") or _default_template(config.get("chat_template"))
        self._special = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        self._template = _compile(template) if template else None

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(token_ids)))

    def decoder(self) -> Callable[[Sequence[int]], str]:
        """A function from the next tokens of one output to the text that they complete.

        Bytes of an unfinished character wait for the next call.
        """
        stream = DecodeStream(skip_special_tokens=True)

        def step(token_ids: Sequence[int]) -> str:
            return "".join(stream.step(self._tokenizer, id) or "" for id in token_ids)

        return step

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt text of a chat, ready for the assistant's turn.

        ``variables`` go to the template (``tools``, ``enable_thinking``, ...). Raises
        ValueError where there is no template or it refuses the messages.
        """
        if self._template is None:
            raise ValueError("the model has no chat template")
        variables = {"add_generation_prompt": True, **self._special, **variables}
        try:
            return self._template.render(messages=messages, **variables)
        except jinja2.TemplateError as error:
            raise ValueError(f"chat template: {error}") from error


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Tokenizer of a checkpoint folder; None where there is no tokenizer.json."""
    files = {name: (folder / name).read_text("utf-8") for name in FILES if (folder / name).is_file()}
    return Tokenizer(files) if "tokenizer.json" in files else None


def _default_template(template: str | list[dict[str, str]] | None) -> str | None:
    """tokenizer_config.json holds one template, or several by name."""
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def _content(token: str | dict[str, Any] | None) -> str:
    """tokenizer_config.json gives a special token as a string or as an AddedToken record."""
    return str(token["content"]) if isinstance(token, dict) else token or ""


def _compile(template: str) -> jinja2.Template:
    """The environment that chat templates are written for (transformers' apply_chat_template)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, which a prompt must not.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
