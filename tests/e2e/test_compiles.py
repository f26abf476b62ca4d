"""No request compiles a program after warm-up."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gimbal_jax.serving.runtime.device_runner import DeviceRunner
from tests.e2e.rig import CONFIG, MODEL, random_requests, session

REQUESTS = 800


@pytest.mark.slow
def test_mixed_requests_compile_nothing(runner):
    rng = np.random.default_rng(3)
    requests = random_requests(rng, REQUESTS, prompt=12, output=5)
    before = runner.compiles_after_warmup()
    with session(runner, policy="eplb", window_steps=50) as mixed:
        cancelled = 0
        for arriving in np.array_split(np.array(requests, object), REQUESTS // 4):
            for request in arriving:
                mixed.server.submit(request)
            mixed.tick(2)
            if rng.random() < 0.2:
                mixed.server.cancel(f"r{rng.integers(REQUESTS)}")
                cancelled += 1
            mixed.server.status()
        mixed.run([])
        status = mixed.server.status()
    assert len(mixed.ends) >= REQUESTS - cancelled
    assert {"length", "stop"} <= set(mixed.ends.values())
    assert status.placement.totals.experts_moved > 20
    assert status.steps.compiles_after_warmup == before


def test_a_compilation_after_warm_up_is_counted(runner):
    before = runner.compiles_after_warmup()
    jax.jit(lambda x: x * 3 + before)(jnp.arange(before + 7)).block_until_ready()
    assert runner.compiles_after_warmup() > before


def test_compilations_of_warm_up_are_not_counted(runner):
    cold = DeviceRunner(MODEL, CONFIG, runner.mesh, runner.weights, runner.slot_of_expert_LE, "float32")
    jax.jit(lambda x: x * 5)(jnp.arange(13)).block_until_ready()
    assert cold.compiles_after_warmup() == 0


@pytest.mark.slow
def test_steps_are_compiled_with_the_checked_options(runner, monkeypatch):
    """``planning.compiled`` checks programs compiled with these; an option that XLA does not know shows their use."""
    monkeypatch.setattr("gimbal_jax.serving.runtime.device_runner.COMPILER_OPTIONS", {"no_such_option": "1"})
    cold = DeviceRunner(MODEL, CONFIG, runner.mesh, runner.weights, runner.slot_of_expert_LE, "float32")
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        cold.warm_up()
