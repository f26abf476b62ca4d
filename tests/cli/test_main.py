"""The ``gimbal`` command: help, conversion, and errors of one line with exit code 2."""

import asyncio
import functools
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import typer
from flax import nnx
from typer.testing import CliRunner, Result

from gimbal_jax.cli.main import app
from gimbal_jax.config import MeshConfig
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.loading import load_weights
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.scheduler.counts_file import load_counts, save_placement
from tests.serving.fake_server import FakeCore, running_server

GOLDENS = Path(__file__).parents[1] / "goldens"
BASE = GOLDENS / "base"
COMMANDS = ("serve", "counts", "place", "demo-model", "convert", "mesh", "simulate", "top", "bench")


def gimbal(*arguments: object) -> Result:
    """Run in this process, on the tests' four CPU devices; an exception is a failure, not an answer."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], env={"COLUMNS": "80", "TERM": "dumb"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture(scope="module")
def converted(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "orbax"
    result = gimbal("convert", BASE, folder, "--dp", 2, "--tp", 2)
    assert result.exit_code == 0, result.output
    assert f"wrote {folder}" in result.stderr
    return folder


def test_converted_checkpoints_load_as_the_same_weights(converted):
    config = load_config(converted)
    assert config == load_config(BASE)
    mesh = make_mesh(MeshConfig(1, 2))
    (got, got_LE), (want, want_LE) = (load_weights(folder, config, mesh, jnp.float32) for folder in (converted, BASE))
    np.testing.assert_array_equal(got_LE, want_LE)
    wanted = dict(nnx.to_flat_state(want))
    for path, variable in nnx.to_flat_state(got):
        np.testing.assert_array_equal(variable.get_value(), wanted.pop(path).get_value(), err_msg=str(path))
    assert not wanted


@pytest.mark.parametrize("dtype,stored", [("auto", jnp.bfloat16), ("float32", jnp.float32)])
def test_convert_keeps_the_type_of_the_configuration_unless_told(tmp_path, dtype, stored):
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(BASE, source)
    config = source / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float32"', '"dtype": "bfloat16"'))
    assert gimbal("convert", source, target, "--dtype", dtype).exit_code == 0
    # Restored as float32: bfloat16 has lost the lower bits.
    weights, _ = load_weights(target, load_config(target), make_mesh(MeshConfig()), jnp.float32)
    embed = dict(nnx.to_flat_state(weights))[("embed",)].get_value()
    assert (embed == embed.astype(jnp.bfloat16)).all() == (stored == jnp.bfloat16)


def test_demo_model_writes_a_folder_that_can_be_converted(tmp_path):
    folder = tmp_path / "[new]" / "demo"
    result = gimbal("demo-model", folder)
    assert result.exit_code == 0, result.output
    assert f"gimbal serve {folder} --devices cpu:4 --dp 2 --tp 2" in result.stderr
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
    assert gimbal("convert", folder, tmp_path / "orbax", "--dp", 2, "--tp", 2).exit_code == 0
    assert (tmp_path / "orbax" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(("option", "factor"), [((), 1), (("--total",), 10)])
def test_counts_of_a_running_server_become_a_file(tmp_path, option, factor):
    async def main(core: FakeCore) -> Result:
        async with asyncio.timeout(120), running_server(core) as (_, port, *_):
            return await asyncio.to_thread(gimbal, "counts", "--target", f"127.0.0.1:{port}", path, *option)

    path = tmp_path / "window.npz"
    with FakeCore() as core:
        result = asyncio.run(main(core))
    assert (result.exit_code, result.stderr.strip()) == (0, f"wrote {path}")
    np.testing.assert_array_equal(load_counts(path).counts_WLSE[0], core.status().placement.window_counts_LSE * factor)


def test_help_names_every_command_and_says_what_every_option_does():
    listed = gimbal("--help").stdout
    group = typer.main.get_command(app)
    assert isinstance(group, typer.core.TyperGroup)
    commands = group.commands
    assert set(commands) == set(COMMANDS)
    for name, command in commands.items():
        assert name in listed
        text = gimbal(name, "--help").stdout
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{name} {parameter.name}"
            if parameter.param_type_name == "option":
                assert parameter.opts[0] in text


def test_without_arguments_the_help_is_shown():
    assert gimbal().output.strip() == gimbal("--help").output.strip()


ERRORS = {
    "devices": (("serve", BASE, "--devices", "tpu"), "--devices tpu: must be auto, gpu, cpu or cpu:N"),
    "device count": (("serve", BASE, "--devices", "cpu:x"), "--devices cpu:x: must be auto, gpu, cpu or cpu:N"),
    "devices of convert": (("convert", BASE, "{tmp}/new", "--devices", "gpu:2"), "--devices gpu:2: must be"),
    "missing folder": (("serve", "{tmp}/none"), "{tmp}/none is neither a folder nor a hub id"),
    "missing folder before devices": (
        ("serve", "{tmp}/none", "--dp", 4, "--tp", 2),
        "is neither a folder nor a hub id",
    ),
    "missing source": (("convert", "{tmp}/none", "{tmp}/new"), "{tmp}/none is neither a folder nor a hub id"),
    "empty folder": (("serve", "{tmp}"), "{tmp} holds no config.json"),
    "revision of a folder": (("serve", BASE, "--revision", "v1"), "is a folder, which has no revision v1"),
    "too few devices": (("serve", BASE, "--dp", 4, "--tp", 2), "dp * tp = 8 devices are needed and there are 4"),
    "heads": (
        ("serve", BASE, "--tp", 3),
        "num_attention_heads = 4 must be divisible by tp = 3; vocab_size = 128 must be divisible by tp = 3;",
    ),
    "experts": (
        ("convert", BASE, "{tmp}/new", "--dp", 3),
        "num_experts = 8 must be divisible by dp * tp = 3; [1, 2, 4, 8] would work",
    ),
    "save folder in use": (("serve", BASE, "--save", "{converted}"), "{converted} already holds a checkpoint"),
    "target in use": (("convert", BASE, "{converted}"), "{converted} already holds a checkpoint"),
    "target that Orbax would lose": (("convert", BASE, "{tmp}/[v2]"), "{tmp}/[v2]: Orbax cannot write below a folder"),
    "source converted": (("convert", "{converted}", "{tmp}/new"), "{converted} is an Orbax checkpoint already"),
    "target is a file": (("convert", BASE, BASE / "config.json"), "config.json"),
    "too long": (("serve", BASE, "--max-model-len", 257), "--max-model-len 257 is beyond the model's 256 positions"),
    "no placement file": (("serve", BASE, "--placement-file", "{tmp}/none.npz"), "{tmp}/none.npz"),
    "another file": (
        ("serve", BASE, "--placement-file", BASE / "config.json"),
        "config.json: must be an .npz file of arrays",
    ),
    "another model's placement": (
        ("serve", BASE, "--placement-file", "{placement}"),
        "the placement must be for 3 layers of 8 experts on 1 ranks, not 3 layers of 4 experts on 2 ranks",
    ),
    "dump folder": (("serve", BASE, "--dump-counts", BASE / "config.json"), "config.json"),
    "no server": (("counts", "--target", "127.0.0.1:1", "{tmp}/new"), "127.0.0.1:1: "),
    "brackets": (("serve", "{tmp}/[a] [/b]"), "{tmp}/[a] [/b] is neither a folder"),
}


@pytest.mark.parametrize("arguments,message", ERRORS.values(), ids=ERRORS)
def test_errors_are_one_line_with_exit_code_2(tmp_path, converted, arguments, message):
    save_placement(tmp_path / "placement.npz", np.tile(np.arange(4), (3, 1)), {"ranks": 2})
    places = {"{tmp}": tmp_path, "{converted}": converted, "{placement}": tmp_path / "placement.npz"}

    def filled(text: object) -> str:
        return functools.reduce(lambda said, place: said.replace(place[0], str(place[1])), places.items(), str(text))

    result = gimbal(*map(filled, arguments))
    assert result.exit_code == 2
    *progress, last = result.stderr.splitlines()
    assert last.startswith("error: ") and filled(message) in last
    assert not [line for line in progress if line.strip() and not line.startswith(("fetching", "loading"))]
    assert result.stdout == ""
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    "arguments",
    [("serve",), ("serve", BASE, "--dp", 0), ("serve", BASE, "--dispatch", "best"), ("convert", BASE), ("fly",)],
    ids=str,
)
def test_usage_errors_have_exit_code_2(arguments):
    result = gimbal(*arguments)
    assert result.exit_code == 2
    assert "Usage: " in result.stderr
