"""Text to token ids and back, and chat messages to text, from a checkpoint's own files."""

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
    """Built from the contents of the files named in ``FILES``, of which only the first must be there.

    Raises ValueError that names the file that is wrong.
    """

    def __init__(self, files: Mapping[str, str]) -> None:
        self.json = files["tokenizer.json"]
        """What it was made from, for libraries that read it themselves."""
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
        """True for a text so long that it must have more tokens, known without counting them.

        No token stands for more characters than the longest one has; normalisation may at most halve them (ours).
        """
        return len(text) > 2 * self._longest * tokens

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens."""
        return str(self._tokenizer.decode(list(token_ids)))

    def decoder(self, skip_special_tokens: bool = True) -> Callable[[Sequence[int]], str]:
        """A function from the next tokens of one output to the text that they complete.

        Bytes of an unfinished character wait for the next call.
        """
        stream = DecodeStream(skip_special_tokens=skip_special_tokens)

        def step(token_ids: Sequence[int]) -> str:
            return "".join(stream.step(self._tokenizer, id) or "" for id in token_ids)

        return step

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def render_chat(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """The prompt text of a chat, ready for the assistant's turn.

        ``variables`` go to the template (``tools``, ``enable_thinking``, ...). Raises
        ValueError where there is no template or it refuses the messages.
        """
        if self._template is None:
            rule = "the model has no chat template: put chat_template.jinja into its folder, or send the prompt as text"
            raise ValueError(rule)
        variables = {"add_generation_prompt": True, **self._special, **variables, "messages": messages}
        try:
            return self._template.render(variables)
        # A template is a program, and these are values of a client: whatever goes wrong there is a refusal.
        except Exception as error:
            raise ValueError(f"chat template: {error}") from error


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """Tokenizer of a checkpoint folder; None without a tokenizer.json. Raises ValueError that names the file."""
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
    """Whatever the libraries raise of a damaged file becomes a ValueError that names it: they have no common type."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{name} cannot be used: {error}") from error


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
