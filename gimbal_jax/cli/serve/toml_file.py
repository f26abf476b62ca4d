"""The options of ``gimbal serve`` from flags and from a TOML file."""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import json
import math
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer

from gimbal_jax.cli.serve.options import ServeOptions, hints, key_of, policy_hints
from gimbal_jax.cli.serve.policy_tables import RECORDS, TABLES, kind_of
from gimbal_jax.cli.terminal import fail

_RECORDS = "gimbal_jax.records"
"""Key of the configuration file's tables in typer's context."""


def takes_serve_options(command: Callable[[ServeOptions], None]) -> Callable[..., None]:
    """Make ``command`` a command for typer, with a flag for each option, ``--config`` and ``--print-config``."""

    def run(*, context: typer.Context, config: None, print_config: bool, **values: Any) -> None:
        try:
            options = options_from(values, context.meta.get(_RECORDS, {}))
        except ValueError as error:
            fail(str(error))
        if print_config:
            typer.echo(to_toml(options), nl=False)
        else:
            command(options)

    run.__signature__ = inspect.Signature(list(_parameters()))  # type: ignore[attr-defined]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run


def _parameters() -> Iterator[inspect.Parameter]:
    """Yield the parameters of ``gimbal serve``."""
    keyword = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    annotations = hints()
    for field in dataclasses.fields(ServeOptions):
        if field.name in annotations:
            yield keyword(field.name, default=field.default, annotation=_for_typer(annotations[field.name]))
        else:
            yield from _policy_parameters(field.name)
    config = typer.Option(
        is_eager=True,
        callback=_take_config,
        help="TOML file with any of these options, without their dashes in front; flags win over it.",
    )
    show = typer.Option("--print-config", help="Print the resulting options as such a file, and serve nothing.")
    yield keyword("config", default=None, annotation=Annotated[Path | None, config])
    yield keyword("print_config", default=False, annotation=Annotated[bool, show])
    yield keyword("context", annotation=typer.Context)


def _policy_parameters(table: str) -> Iterator[inspect.Parameter]:
    """Yield the flags for fields of a table."""
    annotations = policy_hints()
    for field, setting in TABLES[table].items():
        if setting.flag is not None:
            yield inspect.Parameter(
                setting.flag,
                inspect.Parameter.KEYWORD_ONLY,
                default=getattr(RECORDS[table], field),
                annotation=annotations[setting.flag],
            )


def options_from(values: Mapping[str, Any], records: Mapping[str, Any]) -> ServeOptions:
    """Return the options of parsed flags. ValueError if a number is not finite.

    Args:
      values: value of each flag, by name.
      records: tables of the configuration file, by name; their fields that have flags are replaced by ``values``.
    """
    given: dict[str, Any] = {
        name: tuple(values[name]) if isinstance(values[name], list) else values[name] for name in hints()
    }
    for table, settings in TABLES.items():
        flags = {field: values[setting.flag] for field, setting in settings.items() if setting.flag is not None}
        given[table] = dataclasses.replace(records.get(table, RECORDS[table]()), **flags)
    return ServeOptions(**given)


def _for_typer(hint: Any) -> Any:
    """Return the annotation with a list for a tuple of strings, as typer wants several values."""
    kind, *details = get_args(hint)
    return Annotated[list[str], *details] if kind == tuple[str, ...] else hint


def _take_config(context: typer.Context, path: Path | None) -> None:
    """Make the values of the file the defaults of this call."""
    if path is None:
        return
    try:
        values = read_config(path)
    except (ValueError, OSError) as error:
        fail(str(error))
    records = {table: values.pop(table) for table in TABLES if table in values}
    context.meta[_RECORDS] = records
    context.default_map = values | {
        setting.flag: getattr(record, field)
        for table, record in records.items()
        for field, setting in TABLES[table].items()
        if setting.flag is not None
    }


def read_config(path: Path) -> dict[str, Any]:
    """Return the values of a configuration file by field of ``ServeOptions``; tables are records.

    Raises ValueError that names the file, the key and what is allowed, OSError if the file cannot be read.
    """
    try:
        table = tomllib.loads(path.read_text("utf-8"))
    except ValueError as error:  # TOML's and UTF-8's
        raise ValueError(f"{path}: {error}") from error
    fields = {key_of(name): (name, *get_args(hint)) for name, hint in hints().items()}
    values = {}
    for key, value in table.items():
        if key in TABLES:
            values[key] = _read_table(path, key, value)
        elif key in fields:
            name, kind, info = fields[key]
            _check_value(path, key, value, kind, info.min, info.max)
            values[name] = value
        else:
            raise ValueError(f"{path}: {_unknown(key, [*fields, *TABLES])}")
    return values


def _read_table(path: Path, table: str, values: object) -> Any:
    """Return the record of a table. ValueError if it is not one of its fields and values."""
    if not isinstance(values, dict):
        raise ValueError(f"{path}: {table} = {_toml_value(values)}: must be a table, as [{table}] with policy = ...")
    fields = {key_of(name): name for name in TABLES[table]}
    found: dict[str, Any] = {}
    for key, value in values.items():
        if key not in fields:
            raise ValueError(f"{path}: {_unknown(key, list(fields), table)}")
        name, setting = fields[key], TABLES[table][fields[key]]
        kind = kind_of(table, name)
        _check_value(path, f"{table}.{key}", value, kind, setting.low, setting.high)
        if value in (math.inf, -math.inf):
            raise ValueError(f"{path}: {table}.{key} = {value}: must be a finite number")
        found[name] = float(value) if kind is float else value
    return RECORDS[table](**found)


def _unknown(key: str, known: list[str], table: str | None = None) -> str:
    """Describe an unknown key, with the one that may be meant."""
    name = f"{table}.{key}" if table else key
    homes = [home for home, settings in TABLES.items() if key in map(key_of, settings) and home != table]
    near = difflib.get_close_matches(key, known, 1)
    if homes and not near:
        return f"unknown key {name!r}: it belongs to the table [{homes[0]}]"
    guess = f" (is it {near[0]}?)" if near else ""
    return f"unknown key {name!r}{guess}; there are {', '.join(known)}"


def _check_value(path: Path, key: str, value: object, kind: Any, low: float | None, high: float | None) -> None:
    """Raise ValueError if a field of this type and range does not take the value."""
    if wanted := _allowed(value, kind, low, high):
        shown = "{...}" if isinstance(value, dict) else _toml_value(value)
        raise ValueError(f"{path}: {key} = {shown}: must be {wanted}")


def _allowed(value: object, kind: Any, low: float | None, high: float | None) -> str | None:
    """Return the values that a field takes, if it does not take this one; else None."""
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
    """Return a configuration file that gives these options; keys without a value are comments."""
    return "\n".join((*_toml_lines(options), *_table_lines(options))) + "\n"


def _toml_lines(options: ServeOptions) -> Iterator[str]:
    panel = None
    for name, hint in hints().items():
        info = get_args(hint)[1]
        if info.rich_help_panel != panel:
            panel = info.rich_help_panel
            yield f"\n# {panel}"
        value = getattr(options, name)
        yield f"\n# {info.help}{_choices(get_args(hint)[0])}"
        yield f"# {key_of(name)} =" if value is None else f"{key_of(name)} = {_toml_value(value)}"


def _table_lines(options: ServeOptions) -> Iterator[str]:
    for table, settings in TABLES.items():
        yield f"\n[{table}]"
        for name, setting in settings.items():
            yield f"\n# {setting.help}{_choices(kind_of(table, name))}"
            yield f"{key_of(name)} = {_toml_value(getattr(getattr(options, table), name))}"


def _choices(kind: Any) -> str:
    return f" One of {', '.join(get_args(kind))}." if get_origin(kind) is Literal else ""


def _toml_value(value: object) -> str:
    if isinstance(value, (bool, str, list, tuple, Path)):
        # TOML writes these as JSON does, but for one character.
        return json.dumps(value, ensure_ascii=False, default=str).replace("\x7f", "\\u007f")
    return str(value)
