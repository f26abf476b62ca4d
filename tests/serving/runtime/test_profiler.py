from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from smg_grpc_proto.generated import common_pb2

from gimbal_jax.exceptions import InvalidField, Unsupported
from gimbal_jax.serving.runtime.profiler import _UNSUPPORTED, Profiler


def start(profiler, **fields):
    return profiler.start(common_pb2.StartProfileRequest(**fields))


@pytest.fixture
def profiler(tmp_path):
    profiler = Profiler(tmp_path / "profiles")
    yield profiler
    profiler.stop()


@pytest.mark.parametrize("output_dir", [None, "", "night/run_1.2"])
def test_trace_is_in_the_folder_that_stop_returns(profiler, tmp_path, output_dir):
    assert start(profiler, output_dir=output_dir).success
    jnp.arange(8).sum().block_until_ready()
    answer = profiler.stop()
    assert answer.success
    folder = Path(answer.message.removeprefix("the trace is in "))
    assert folder == tmp_path / "profiles" / (output_dir or "")
    (trace,) = folder.glob("plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 1000


def test_only_one_trace_runs_at_a_time(profiler):
    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda n: start(profiler, output_dir=f"run{n}"), range(4)))
    assert sorted(answer.success for answer in answers) == [False, False, False, True]
    rejected = next(answer for answer in answers if not answer.success)
    assert "running already" in rejected.message
    assert profiler.stop().success
    assert not profiler.stop().success
    assert start(profiler).success


def test_stop_does_not_end_a_trace_of_another_part_of_the_process(profiler, tmp_path):
    jax.profiler.start_trace(tmp_path / "other")
    try:
        answer = start(profiler)
        assert not answer.success and "no trace was started" in answer.message
        assert profiler.stop().message == "no trace is running"
    finally:
        jax.profiler.stop_trace()
    assert start(profiler).success


@pytest.mark.parametrize(
    "output_dir", ["/tmp/x", "..", "a/../../b", "link", "link/x", "a//b", "a\0b", "a b", "~", "a" * 201]
)
def test_output_dir_stays_within_the_folder(profiler, tmp_path, output_dir):
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "link").symlink_to(tmp_path)
    with pytest.raises(InvalidField, match="output_dir must be "):
        start(profiler, output_dir=output_dir)
    assert profiler.stop().message == "no trace is running"


def test_unwritable_folder_gives_a_response_without_success(tmp_path):
    (tmp_path / "file").write_text("")
    answer = start(Profiler(tmp_path / "file"))
    assert not answer.success and "no trace was started" in answer.message


def test_failed_write_loses_only_its_own_trace(profiler, tmp_path):
    assert start(profiler, output_dir="run").success
    (tmp_path / "profiles" / "run").rmdir()
    (tmp_path / "profiles" / "run").write_text("")
    answer = profiler.stop()
    assert not answer.success and "was lost" in answer.message
    assert start(profiler, output_dir="next").success and profiler.stop().success


@pytest.mark.parametrize(
    "fields",
    [
        {"start_step": 0},
        {"num_steps": 5},
        {"activities": ["CPU"]},
        {"with_stack": False},
        {"record_shapes": True},
        {"profile_by_stage": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_unsupported_field_is_named(profiler, fields):
    with pytest.raises(Unsupported, match=next(iter(fields))):
        start(profiler, **fields)


def test_every_field_of_the_request_is_covered():
    names = set(common_pb2.StartProfileRequest.DESCRIPTOR.fields_by_name)
    assert names == {"output_dir", *_UNSUPPORTED}
