"""Text to token ids and back, and chat messages to text, by the files of a checkpoint."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import tokenizers
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers.decoders import DecodeStream

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


class Tokenizer:
    """The tokenizer and chat template of a checkpoint.

    ``files`` holds the contents of the files named in ``FILES``; only the first is required. ``json`` is the
    content of tokenizer.json, for libraries that read it themselves. Raises ValueError that names the bad file.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self.json = files["tokenizer.json"]
        with _wrong_in("tokenizer.json"):
            self._tokenizer = tokenizers.Tokenizer.from_str(self.json)
            self._longest = max(map(len, self._tokenizer.get_vocab()), default=1)
        with _wrong_in("tokenizer_config.json"):
            config = json.loads(files.get("tokenizer_config.json", "{}"))
            template = files.get("chat_template.jinja") or _default_template(config.get("chat_template"))
            self._special = {name: _content(config.get(name)) for name in ("bos_token", "eos_token", "pad_token")}
        with _wrong_in("chat_template.jinja" if "chat_template.jinja" in files else "tokenizer_config.json"):
            self._template = _compile(template) if template else None

    def surely_exceeds(self, text: str, tokens: int) -> bool:
        """Return True if ``text`` is so long that it must have more than ``tokens`` tokens, without counting them.

        A token covers at most as many characters as the longest token has. Normalisation may at most halve
        the characters (ours).
        """
        return len(text) > 2 * self._longest * tokens

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of the tokens, without special tokens."""
        return str(self._tokenizer.decode(list(token_ids)))

    def decoder(self, skip_special_tokens: bool = True) -> Callable[[Sequence[int]], str]:
        """Return a function from the next tokens of one output to the text that they complete.

        The function keeps the bytes of an unfinished character for the next call.
        """
        stream = DecodeStream(skip_special_tokens=skip_special_tokens)

        def step(token_ids: Sequence[int]) -> str:
            return "".join(stream.step(self._tokenizer, id) or "" for id in token_ids)

        return step

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """Return the prompt text of a chat, ready for the assistant's turn.

        ``variables`` go to the template (``tools``, ``enable_thinking``, ...). Raises ValueError if there
        is no template, or if the template rejects the messages.
        """
        if self._template is None:
            rule = "the model has no chat template: put chat_template.jinja into its folder, or send the prompt as text"
            raise ValueError(rule)
        variables = {"add_generation_prompt": True, **self._special, **variables, "messages": messages}
        try:
            return self._template.render(variables)
        # A template is a program that runs on values of a client, so every error counts as a rejection.
        except Exception as error:
            raise ValueError(f"chat template: {error}") from error


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Load the tokenizer of a checkpoint folder; None without a tokenizer.json. Raises ValueError naming the file."""
    files = {}
    try:
        for name in FILES:
            if (folder / name).is_file():
                with _wrong_in(name):
                    files[name] = (folder / name).read_text("utf-8")
        return Tokenizer(files) if "tokenizer.json" in files else None
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from error


@contextlib.contextmanager
def _wrong_in(name: str) -> Iterator[None]:
    """Turn every exception of the libraries into a ValueError that names the file. They have no common type."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} cannot be used: {error}") from error


def _default_template(template: str | list[dict[str, str]] | None) -> str | None:
    """Return the default template. tokenizer_config.json holds one template, or a list of named ones."""
    if isinstance(template, list):
        return next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def _content(token: str | dict[str, Any] | None) -> str:
    """Return the text of a special token, which tokenizer_config.json gives as a string or an AddedToken record."""
    return str(token["content"]) if isinstance(token, dict) else token or ""


def _compile(template: str) -> jinja2.Template:
    """Compile a chat template in the environment that it is written for (transformers' apply_chat_template)."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    return environment.from_string(template)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML, but a prompt must keep its characters.
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
