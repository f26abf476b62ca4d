"""``python -m tests.e2e.faulty_serve FAULT ...`` is ``gimbal ...`` on devices without a model that fail in that way."""

import sys
import time
from unittest.mock import patch

import jax

from gimbal_jax.cli.main import app
from gimbal_jax.exceptions import DevicesLost
from tests.serving.engine.fake_runner import FakeRunner

FAULT = sys.argv.pop(1)
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.5GiB.\nlargest buffers:\n  1. 1.00GiB"


class FaultyDevices(FakeRunner):
    weights = None

    def __init__(self, model, config, *_, **__):
        super().__init__(model, config)
        self.on_wait = lambda results: time.sleep(0.02)
        if FAULT == "slow loading":
            time.sleep(600)

    def warm_up(self, progress):
        progress(1, 1000)
        while FAULT == "slow warm-up":
            progress(1, 1000)
            time.sleep(0.01)

    def enqueue(self, plans, mark):
        if FAULT == "out of memory" and any(len(chunk.tokens) > 4 for plan in plans for chunk in plan.prefill):
            raise jax.errors.JaxRuntimeError(OUT_OF_MEMORY)
        return super().enqueue(plans, mark)

    def migrate(self, layer, moves):
        raise DevicesLost("the experts of MoE layer 0 were lost while they moved")


if __name__ == "__main__":
    with patch("gimbal_jax.serving.runtime.device_runner.DeviceRunner", FaultyDevices):
        app(prog_name="gimbal")
