"""From the options of ``gimbal serve`` to the records that the server is made of, and what is refused on the way."""

import dataclasses
from pathlib import Path

import jax
import pytest
from typer.testing import CliRunner

from gimbal_jax.cli.main import app
from gimbal_jax.cli.serve import command as serve_cli
from gimbal_jax.cli.serve.command import gateway_config, network_config, server_config
from gimbal_jax.cli.serve.options import ServeOptions
from gimbal_jax.cli.serve.setup import find_checkpoint, program_cache
from gimbal_jax.config import GPU_ENGINE, DispatchConfig, EngineConfig, NetworkConfig, PlacementConfig, QueueConfig
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.serving.runtime.programs import compile_programs

BASE = Path(__file__).parents[2] / "goldens" / "base"
MODEL = load_config(BASE)
KEY = "a-key-of-16-chars"


@pytest.mark.parametrize(("on_gpu", "default"), [(False, EngineConfig()), (True, GPU_ENGINE)])
def test_limits_of_engines_follow_the_device_where_the_user_says_nothing(on_gpu, default):
    engine = server_config(ServeOptions(max_rows=7), MODEL, on_gpu=on_gpu).engine
    assert engine.max_rows == 7
    for limit in ("page_size", "num_pages", "token_budget", "tile"):
        assert getattr(engine, limit) == getattr(default, limit)


def test_sequences_are_no_longer_than_the_model_s_positions():
    assert server_config(ServeOptions(), MODEL, on_gpu=False).engine.max_model_len == MODEL.max_position
    assert server_config(ServeOptions(max_model_len=9), MODEL, on_gpu=False).engine.max_model_len == 9
    with pytest.raises(ValueError, match=f"--max-model-len 257 is beyond the model's {MODEL.max_position} positions"):
        server_config(ServeOptions(max_model_len=257), MODEL, on_gpu=False)


def test_policies_arrive():
    dispatch, queue = DispatchConfig("late", high_kv=0.5), QueueConfig("fcfs")
    placement = PlacementConfig("eplb", window_steps=3, rows_per_pair=1)
    options = ServeOptions(dispatch=dispatch, queue=queue, placement=placement)
    config = server_config(options, MODEL, on_gpu=False)
    assert (config.dispatch, config.queue, config.placement) == (dispatch, queue, placement)


def test_the_network_has_the_options_of_the_same_names():
    assert network_config(ServeOptions()) == NetworkConfig()
    other = NetworkConfig("::1", 1, Path("c"), Path("k"), Path("ca"), Path("keys"), 2, 3)
    assert network_config(ServeOptions(**dataclasses.asdict(other))) == other


def test_checkpoints_have_a_name_and_a_type():
    bfloat16 = dataclasses.replace(MODEL, dtype="bfloat16", weights_dtype="bfloat16")
    found = find_checkpoint(ServeOptions(model=str(BASE)), on_cpu=True)
    assert (found.folder, found.name, found.config.dtype) == (BASE, "base", "float32")
    named = find_checkpoint(ServeOptions(model=str(BASE), served_model_name="x/y", dtype="bfloat16"), on_cpu=True)
    assert (named.name, named.config) == ("x/y", bfloat16)
    assert find_checkpoint(ServeOptions(model=str(BASE)), on_cpu=False).config.dtype == MODEL.dtype


def test_the_gateway_gets_what_concerns_http(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY} alice\n")
    options = ServeOptions(
        http_port=8000,
        http_host="::",
        http_api_key_file=keys,
        api_keys=keys,
        cors_origin=("*",),
        tls_cert=Path("c"),
        tls_key=Path("k"),
        tool_call_parser="qwen",
        reasoning_parser="qwen3",
        max_message_mib=3,
        dp=2,
        max_rows=5,
        max_queue=7,
        otlp_traces_endpoint="http://collector:4317",
    )
    got = gateway_config(options, BASE, server_config(options, MODEL, on_gpu=False))
    assert got is not None
    assert (got.model, got.port, got.host, got.keys) == (BASE, 8000, "::", (("alice", KEY),))
    assert (got.cors_origins, got.tls_cert, got.tls_key) == (("*",), Path("c"), Path("k"))
    assert (got.tool_call_parser, got.reasoning_parser) == ("qwen", "qwen3")
    assert (got.max_payload_mib, got.max_requests) == (3, 2 * (5 + 7))
    assert got.traces_endpoint == "collector:4317"
    encrypted = dataclasses.replace(options, otlp_traces_endpoint="https://collector:4317")
    got = gateway_config(encrypted, BASE, server_config(options, MODEL, on_gpu=False))
    assert got is not None and got.traces_endpoint is None


def test_http_is_off_by_default_and_never_more_open_than_grpc():
    config = server_config(ServeOptions(), MODEL, on_gpu=False)
    assert gateway_config(ServeOptions(), BASE, config) is None
    by_key, by_certificate = (
        ServeOptions(http_port=8000, api_keys=BASE),
        ServeOptions(http_port=8000, tls_client_ca=BASE),
    )
    for closed in (by_key, by_certificate):
        with pytest.raises(ValueError, match="needs --http-api-key-file: HTTP would be open"):
            gateway_config(closed, BASE, config)


def test_a_model_is_needed_to_serve_but_not_to_print_the_configuration(monkeypatch):
    monkeypatch.setattr(serve_cli, "set_up_devices", lambda *options: pytest.fail("devices were touched"))
    refused = CliRunner().invoke(app, ["serve"], env={"COLUMNS": "120", "TERM": "dumb"})
    assert refused.exit_code == 2
    assert "MODEL" in refused.stderr and "give a folder or a hub id" in refused.stderr
    printed = CliRunner().invoke(app, ["serve", "--print-config", "--dp", "4"])
    assert (printed.exit_code, "\ndp = 4\n" in printed.stdout) == (0, True)


def test_programs_are_kept_at_home_or_where_the_user_says_and_off_is_off(tmp_path, monkeypatch, capsys):
    config = server_config(ServeOptions(), MODEL, on_gpu=False)
    kept = (tmp_path / "home" / ".cache" / "gimbal_jax" / "programs", tmp_path / "here" / "programs")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for folder, root in zip((ServeOptions().compile_cache, str(tmp_path / "here")), kept, strict=True):
        cache = program_cache(folder, MODEL, config, jax.devices())
        assert cache is not None
        compile_programs({"one": lambda: jax.jit(lambda x: x + 1).lower(1)}, cache)
        assert len([path for path in root.rglob("*") if path.is_file()]) == 1
    assert program_cache("off", MODEL, config, jax.devices()) is None
    assert capsys.readouterr().err == ""
    assert program_cache("~no-such-user/x", MODEL, config, jax.devices()) is None
    assert "compiled programs are not kept: --compile-cache ~no-such-user/x" in capsys.readouterr().err
