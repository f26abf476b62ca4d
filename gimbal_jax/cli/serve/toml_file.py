"""The options of ``gimbal serve`` from flags and from a TOML file."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import tomllib
import types
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from gimbal_jax.cli.serve.options import ServeOptions, hints, key_of
from gimbal_jax.cli.terminal import fail


def takes_serve_options(command: Callable[[ServeOptions], None]) -> Callable[..., None]:
    """``command`` for typer: with a flag for each option, ``--config`` and ``--print-config``."""
    annotations = hints()

    def run(*, config: None, print_config: bool, **values: Any) -> None:
        given: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
        }
        try:
            options = ServeOptions(**given)
        except ValueError as error:
            fail(str(error))
        if print_config:
            typer.echo(to_toml(options), nl=False)
        else:
            command(options)

    config = typer.Option(
        is_eager=True,
        callback=_take_config,
        help="TOML file with any of these options, without their dashes in front; flags win over it.",
    )
    show = typer.Option("--print-config", help="Print the options in force as such a file, and serve nothing.")
    keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    parameters = [
        *(
            keyword(field.name, default=field.default, annotation=_for_typer(annotations[field.name]))
            for field in dataclasses.fields(ServeOptions)
        ),
        keyword("config", default=None, annotation=Annotated[Path | None, config]),
        keyword("print_config", default=False, annotation=Annotated[bool, show]),
    ]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _for_typer(hint: Any) -> Any:
    """Typer calls several values a list."""
    kind, *details = get_args(hint)
    return Annotated[list[str], *details] if kind == tuple[str, ...] else hint


def _take_config(context: typer.Context, path: Path | None) -> None:
    """Values of the file become the defaults of this call."""
    if path is None:
        return
    try:
        context.default_map = read_config(path)
    except (ValueError, OSError) as error:
        fail(str(error))


def read_config(path: Path) -> dict[str, Any]:
    """Values of a configuration file by field.

    Raises ValueError that names the file, the key and what is allowed, OSError if the file cannot be read.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except ValueError as error:  # TOML's and UTF-8's
        raise ValueError(f"{path}: {error}") from error
    fields = {key_of(name): (name, *get_args(hint)) for name, hint in hints().items()}
    values = {}
    for key, value in table.items():
        if key not in fields:
            near = difflib.get_close_matches(key, fields, 1)
            guess = f" (is it {near[0]}?)" if near else ""
            raise ValueError(f"{path}: unknown key {key!r}{guess}; there are {', '.join(fields)}")
        name, kind, info = fields[key]
        if wanted := _refusal(value, kind, info.min, info.max):
            shown = "{...}" if isinstance(value, dict) else _toml_value(value)
            raise ValueError(f"{path}: {key} = {shown}: must be {wanted}")
        values[name] = value
    return values


def _refusal(value: object, kind: Any, low: float | None, high: float | None) -> str | None:
    """What a field takes, if it does not take this value of a file."""
    if get_origin(kind) in (Union, types.UnionType):
        (kind,) = (part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is Literal:
        return None if value in get_args(kind) else f"one of {', '.join(get_args(kind))}"
    if kind is bool:
        return None if isinstance(value, bool) else "true or false"
    if kind in (int, float):
        fits = type(value) in (int, kind) and (low is None or low <= value) and (high is None or value <= high)  # type: ignore[operator]
        limits = (f" from {low}" if low is not None else "") + (f" to {high}" if high is not None else "")
        return None if fits else ("an integer" if kind is int else "a number") + limits
    if kind == tuple[str, ...]:
        fits = isinstance(value, list) and all(isinstance(item, str) for item in value)
        return None if fits else "an array of strings"
    return None if isinstance(value, str) else "a string"


def to_toml(options: ServeOptions) -> str:
    """The options as a configuration file that gives them again; what is not set is a comment."""
    return "\n".join(_toml_lines(options)) + "\n"


def _toml_lines(options: ServeOptions) -> Iterator[str]:
    panel = None
    for name, hint in hints().items():
        info = get_args(hint)[1]
        if info.rich_help_panel != panel:
            panel = info.rich_help_panel
            yield f"\n# {panel}"
        value = getattr(options, name)
        yield f"\n# {info.help}{_choices(hint)}"
        yield f"# {key_of(name)} =" if value is None else f"{key_of(name)} = {_toml_value(value)}"


def _choices(hint: Any) -> str:
    kind = get_args(hint)[0]
    return f" One of {', '.join(get_args(kind))}." if get_origin(kind) is Literal else ""


def _toml_value(value: object) -> str:
    if isinstance(value, (bool, str, list, tuple, Path)):
        # TOML writes these as JSON does, but for one character.
        return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
    return str(value)
