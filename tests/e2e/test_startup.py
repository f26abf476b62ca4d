"""The second start of a server takes its programs from the folder that the first one filled."""

import jax
import numpy as np

from gimbal_jax.model.loading import load_weights
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.serving.runtime.device_runner import DeviceRunner
from gimbal_jax.serving.runtime.programs import ProgramCache, programs_key
from tests.e2e.rig import CONFIG, FOLDER, MODEL, random_requests, session


def test_a_second_start_compiles_nothing_and_gives_the_same_tokens(tmp_path):
    worked: list[str] = []
    notes: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **kwargs: worked.append(event))
    mesh = make_mesh(CONFIG.mesh)
    devices = mesh.devices.flatten().tolist()

    def start() -> DeviceRunner:
        weights, slot_of_expert_LE = load_weights(FOLDER, MODEL, mesh, "float32")
        cache = ProgramCache(tmp_path, programs_key(MODEL, CONFIG, "float32", devices), devices, notes.append)
        cache.read_ahead()
        runner = DeviceRunner(MODEL, CONFIG, mesh, weights, slot_of_expert_LE, "float32", cache)
        runner.buckets = (runner.buckets[0], runner.buckets[-1])
        worked.clear()
        runner.warm_up()
        return runner

    def answers(runner: DeviceRunner) -> dict[str, list[int]]:
        with session(runner) as served:
            return served.run(random_requests(np.random.default_rng(7), 16, prompt=20, output=10))

    first = start()
    assert worked.count("/jax/core/compile/backend_compile_duration") >= 4
    wanted = answers(first)
    second = start()
    assert [event for event in worked if event.startswith("/jax/core/compile/")] == []
    assert answers(second) == wanted
    assert (second.compiles_after_warmup(), notes) == (0, [])
