"""Options of ``gimbal serve``: flags and the configuration file are the same fields, with the same checks."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from gimbal_jax.cli.serve.options import ServeOptions, key_of
from gimbal_jax.cli.serve.policy_tables import RECORDS, TABLES
from gimbal_jax.cli.serve.toml_file import takes_serve_options, to_toml
from gimbal_jax.config import DispatchConfig, PlacementConfig, QueueConfig

FIELDS = {field.name: field for field in dataclasses.fields(ServeOptions) if field.name not in TABLES}
FLAGS = {setting.flag for settings in TABLES.values() for setting in settings.values() if setting.flag}
taken: list[ServeOptions] = []


@takes_serve_options
def serve(options):
    """Serve."""
    taken.append(options)


app = typer.Typer(add_completion=False)
app.command()(serve)


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"TERM": "dumb", "COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def options_of(*arguments: object) -> ServeOptions:
    taken.clear()
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    (options,) = taken
    return options


def config_file(folder: Path, text: str) -> Path:
    path = folder / "serve.toml"
    path.write_text(text)
    return path


def test_without_arguments_all_is_default():
    assert options_of() == ServeOptions()


def test_every_field_is_a_flag_with_a_help_text_in_a_panel():
    parameters: dict[str | None, Any] = {parameter.name: parameter for parameter in typer.main.get_command(app).params}
    assert set(parameters) - set(FIELDS) - FLAGS == {"config", "print_config"}
    assert set(FIELDS) | FLAGS <= set(parameters)
    for name in (set(FIELDS) | FLAGS) - {"model"}:
        parameter = parameters[name]
        assert parameter.opts[0] == f"--{key_of(name)}"
        assert parameter.help and parameter.help.endswith(".") and parameter.rich_help_panel, name


OTHER: dict[str, Any] = {
    "model": "m",
    "served_model_name": 'a "name"\\ with\tall',
    "cors_origin": ("https://a.example", "*"),
    "log_format": "off",
    "drain_timeout": 0.25,
    "tls_cert": Path("/tls/cert.pem"),
    "http_port": 8000,
    "dispatch": DispatchConfig(policy="late", lambda_moe=0.5, expert_pressure="max"),
    "queue": QueueConfig(aging_s=1.5),
    "placement": PlacementConfig(policy="eplb", min_gain=1e-05, rows_per_pair=3),
    "max_rows": 7,
}


def test_a_printed_configuration_gives_the_same_options_again(tmp_path):
    options = dataclasses.replace(ServeOptions(), **OTHER)
    printed = to_toml(options)
    assert options_of("--config", config_file(tmp_path, printed)) == options
    again = run("--config", config_file(tmp_path, printed), "--print-config")
    assert (again.exit_code, again.stdout) == (0, printed)
    assert run("--print-config").stdout == to_toml(ServeOptions())


TEXT = st.text(st.characters(codec="utf-8"), max_size=20)


@settings(deadline=None, max_examples=200)
@given(name=TEXT, origins=st.lists(TEXT))
def test_any_text_survives_the_file(name, origins):
    read = tomllib.loads(to_toml(ServeOptions(served_model_name=name, cors_origin=tuple(origins))))
    assert (read["served-model-name"], read["cors-origin"]) == (name, origins)


def test_every_field_appears_in_it_with_its_help():
    lines = to_toml(ServeOptions()).splitlines()
    helps = {parameter.name or "": parameter.help for parameter in typer.main.get_command(app).params}  # type: ignore[attr-defined]
    for name, text in helps.items():
        if name in FIELDS:
            (at,) = (i for i, line in enumerate(lines) if line.removeprefix("# ").startswith(f"{key_of(name)} ="))
            assert lines[at - 1].startswith(f"# {text}")
            assert lines[at].startswith("# ") == (FIELDS[name].default is None)


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    path = config_file(
        tmp_path,
        'model = "m"\ndp = 2\nmax-rows = 5\nlog-format = "off"\ncors-origin = ["a"]\n'
        '[placement]\nmin-gain = 0\nbeta = 3\n[queue]\npolicy = "fcfs"\n',
    )
    placement = PlacementConfig(min_gain=0.0, beta=3.0)
    wanted = ServeOptions(
        model="m",
        dp=2,
        max_rows=5,
        log_format="off",
        cors_origin=("a",),
        queue=QueueConfig("fcfs"),
        placement=placement,
    )
    assert options_of("--config", path) == wanted
    flags = ("--dp", 1, "--max-rows", 6, "--log-format", "json", "--cors-origin", "b", "other", "--min-gain", 0.5)
    won = dataclasses.replace(
        wanted,
        model="other",
        dp=1,
        max_rows=6,
        log_format="json",
        cors_origin=("b",),
        placement=dataclasses.replace(placement, min_gain=0.5),
    )
    assert options_of(*flags, "--config", path) == won


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("dpp = 2", "unknown key 'dpp' (is it dp?); there are model, revision,"),
        ("max_rows = 2", "unknown key 'max_rows' (is it max-rows?)"),
        ("config = 'x'", "unknown key 'config'"),
        ("dp = '2'", 'dp = "2": must be an integer'),
        ("dp = 2.0", "dp = 2.0: must be an integer"),
        ("dp = true", "dp = true: must be an integer"),
        ("dp = 0", "dp = 0: must be an integer from 1"),
        ("port = 70000", "port = 70000: must be an integer from 0 to 65535"),
        ("http-port = 0", "http-port = 0: must be an integer from 1 to 65535"),
        ("[placement]\nmin-gain = 1.5", "placement.min-gain = 1.5: must be a number from 0 to 1"),
        ("[placement]\nmin-gain = '0.5'", "must be a number from 0 to 1"),
        ("[placement]\nmin-gain = nan", "placement.min-gain = nan: must be a number from 0 to 1"),
        ("[placement]\nbeta = -1", "placement.beta = -1: must be a number from 0"),
        ("[placement]\nbeta = inf", "placement.beta = inf: must be a finite number"),
        ("[placement]\nload-term = 'sum'", 'placement.load-term = "sum": must be one of square, max'),
        ("[placement]\nrows-per-pair = 0", "placement.rows-per-pair = 0: must be an integer from 1"),
        ("[placement]\nbetta = 1", "unknown key 'placement.betta' (is it beta?); there are policy, alpha,"),
        ("[queue]\nbeta = 1", "unknown key 'queue.beta': it belongs to the table [placement]"),
        ("min-gain = 0.5", "unknown key 'min-gain': it belongs to the table [placement]"),
        ("placement = 'eplb'", 'placement = "eplb": must be a table, as [placement] with policy = ...'),
        ("dtype = 2", "dtype = 2: must be one of auto, float32, bfloat16"),
        ("[dispatch]\npolicy = 'best'", 'dispatch.policy = "best": must be one of gimbal, late, round_robin,'),
        ("host = 1", "host = 1: must be a string"),
        ("tls-cert = ['a']", 'tls-cert = ["a"]: must be a string'),
        ("cors-origin = 'a'", 'cors-origin = "a": must be an array of strings'),
        ("cors-origin = [1]", "must be an array of strings"),
        ("[dp]\nx = 1", "dp = {...}: must be an integer"),
        ("dp = ", "Invalid value (at "),
    ],
)
def test_errors_of_the_file_name_it_the_key_and_what_is_allowed(tmp_path, text, message):
    path = config_file(tmp_path, text)
    result = run("--config", path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {path}: ") and message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_file_that_is_none(tmp_path):
    result = run("--config", tmp_path / "none.toml")
    assert (result.exit_code, str(tmp_path / "none.toml") in result.stderr) == (2, True)
    path = tmp_path / "binary.toml"
    path.write_bytes(b"\xff\xfe")
    assert f"error: {path}: " in run("--config", path).stderr


def test_numbers_are_finite(tmp_path):
    for arguments in (("--drain-timeout", "inf"), ("--config", config_file(tmp_path, "drain-timeout = inf"))):
        result = run(*arguments)
        assert (result.exit_code, result.stderr) == (2, "error: drain-timeout inf: must be a finite number\n")
    assert run("--drain-timeout", "nan").exit_code == 2


def test_a_table_has_every_field_of_its_record():
    assert set(TABLES) == set(RECORDS)
    for table, record in RECORDS.items():
        assert list(TABLES[table]) == [field.name for field in dataclasses.fields(record)]


def test_every_default_of_a_table_is_in_its_range(tmp_path):
    assert options_of("--config", config_file(tmp_path, to_toml(ServeOptions()))) == ServeOptions()


def test_the_document_has_a_file_that_the_server_takes(tmp_path):
    text = (Path(__file__).parents[3] / "docs" / "serving.md").read_text()
    options = options_of("--config", config_file(tmp_path, text.partition("```toml\n")[2].partition("```")[0]))
    assert (options.queue.aging_s, options.placement) == (3.0, PlacementConfig("gimbal_refined", beta=3.0))


def test_choices_are_told_in_the_file():
    assert "# Form of the line on stdout for each request that ended. One of text, json, off." in to_toml(
        ServeOptions()
    )
