"""The devices: a model on a mesh, compiled for every bucket before it serves."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.model.experts import exchange_table, move_experts
from gimbal_jax.model.inputs import StepInputs, StepOutputs
from gimbal_jax.model.step import COMPILER_OPTIONS, DeviceState, abstract_model, new_state, put_by_engine, step
from gimbal_jax.model.transformer import StepLayout
from gimbal_jax.pallas_kernels import backend_of
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.serving.batch import blank, bucket_for, results_of, stack, step_buckets
from gimbal_jax.serving.plan import NextToken, Plan
from gimbal_jax.serving.runner import DevicesLost, Progress


class CompileCounter:
    """Counts XLA compilations of this process from now on, by jax's own monitoring events."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            with self._lock:
                self.count += 1


class DeviceRunner:
    """A model on a mesh. Compiles everything it will ever run in ``warm_up``."""

    def __init__(
        self,
        model: ModelConfig,
        config: ServerConfig,
        mesh: jax.sharding.Mesh,
        weights: nnx.State,
        slot_of_expert_LE: np.ndarray,
        dtype: Any,
    ) -> None:
        """``weights`` stand in the slot order of ``slot_of_expert_LE`` and are shared, not copied."""
        self.model, self.config, self.mesh = model, config, mesh
        self.buckets = step_buckets(config.engine, config.mesh.tp)
        self._graph, self._abstract = abstract_model(model, dtype, mesh)
        backend = backend_of(mesh.devices.flat[0])
        self._layout = StepLayout(mesh, config.engine.tile, config.engine.exchange, backend)
        self._weights = weights
        self._slots = np.array(slot_of_expert_LE, np.int32)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._device_slots = jax.device_put(self._slots, self._replicated)
        self._blank = put_by_engine(blank(config.engine, model.vocab_size, config.mesh.dp), mesh)
        self._state: DeviceState = new_state(model, config.engine, dtype, mesh)
        gate_up, down = self._experts_of(0)
        self.expert_bytes = (gate_up.nbytes + down.nbytes) // model.num_experts
        self._steps: dict[tuple[int, int], jax.stages.Compiled] = {}
        self._move: jax.stages.Compiled | None = None
        self._zero: jax.stages.Compiled | None = None
        self._compilations = CompileCounter()
        self._compiled_at_warmup: int | None = None  # known when it is over

    @property
    def slot_of_expert_LE(self) -> np.ndarray:
        return self._slots

    @property
    def weights(self) -> nnx.State:
        """Parameters, experts in slot order."""
        return self._weights

    def warm_up(self, progress: Progress = lambda done, total: None) -> None:
        """Compile all buckets, the migration and the counter reset, then run each once on nothing.

        Each bucket is lowered here and compiled on a pool: XLA compiles outside the interpreter lock. What
        ``progress`` raises ends the warm-up as soon as the programs that are being compiled are done.
        """
        empty = [Plan()] * self.config.mesh.dp
        jobs = {b: stack(empty, self.config.engine, *b, self._blank) for b in self.buckets}
        run = jax.jit(partial(step, self._graph, self._layout), donate_argnums=1)
        total = len(jobs) + 2
        pool = ThreadPoolExecutor(max_workers=4)
        try:
            compiled = {}
            for bucket, inputs in jobs.items():
                progress(0, total)
                lowered = run.lower(self._weights, self._state, self._device_slots, inputs)
                compiled[bucket] = pool.submit(lowered.compile, COMPILER_OPTIONS)
            for done, (bucket, future) in enumerate(compiled.items(), start=1):
                self._steps[_shape_of(jobs[bucket])] = future.result()
                progress(done, total)
        finally:
            pool.shutdown(cancel_futures=True)
        nowhere = np.zeros(0, np.int32)
        table = exchange_table(nowhere, nowhere, *self._exchange_sizes)
        move = jax.jit(partial(move_experts, mesh=self.mesh), donate_argnums=0)
        self._move = move.lower(self._experts_of(0), *table).compile()
        progress(total - 1, total)
        zero = jax.jit(jnp.zeros_like, donate_argnums=0, out_shardings=self._state.counts_STLE.sharding)
        self._zero = zero.lower(self._state.counts_STLE).compile()
        for inputs in jobs.values():
            self._step(inputs)
        for layer in range(len(self.model.moe_layers)):
            self.migrate(layer, Round(nowhere, nowhere, self._slots[layer]))
        self.take_counts()
        progress(total, total)
        self._compiled_at_warmup = self._compilations.count

    def step(self, plans: Sequence[Plan]) -> list[list[NextToken | None]]:
        rows, tiles = bucket_for(plans, self.buckets)
        outputs = self._step(stack(plans, self.config.engine, rows, tiles, self._blank))
        return [results_of(outputs, plan, s, self.config.engine, rows) for s, plan in enumerate(plans)]

    def _step(self, inputs: StepInputs) -> StepOutputs:
        run = self._steps[_shape_of(inputs)]
        outputs, self._state = run(self._weights, self._state, self._device_slots, inputs)
        if not inputs.sampling.want_logprobs:
            outputs = replace(outputs, logprobs=None)
        if inputs.rare.want_targets is self._blank.want_targets:  # asking the device would take a copy
            outputs = replace(outputs, prompt_logprobs=None)
        return jax.device_get(outputs)

    def take_counts(self) -> np.ndarray:
        assert self._zero is not None, "warm_up comes first"
        counts_STLE = np.asarray(self._state.counts_STLE).astype(np.int64)
        self._state = DeviceState(self._state.pages, self._zero(self._state.counts_STLE))
        return counts_STLE.sum(axis=1).transpose(1, 0, 2)

    def migrate(self, layer: int, moves: Round) -> None:
        assert self._move is not None, "warm_up comes first"
        table = exchange_table(moves.src_slot, moves.dst_slot, *self._exchange_sizes)
        slots = self._slots.copy()
        slots[layer] = moves.slot_of_expert_E
        device_slots = jax.device_put(slots, self._replicated)
        experts = self._experts_of(layer)
        try:
            moved = self._move(experts, *table)
        except Exception as error:
            if any(array.is_deleted() for array in experts):
                raise DevicesLost(f"the experts of MoE layer {layer} were lost while they moved: {error}") from error
            raise
        # From here on nothing can fail, so that weights and table change together.
        mlp = self._mlp(layer)
        for name, array in zip(("gate_up", "down"), moved, strict=True):
            mlp[name].set_value(array)
        self._slots, self._device_slots = slots, device_slots

    def compiles_after_warmup(self) -> int:
        return 0 if self._compiled_at_warmup is None else self._compilations.count - self._compiled_at_warmup

    @property
    def _exchange_sizes(self) -> tuple[int, int, int]:
        return self.model.num_experts, self.config.mesh.ranks, self.config.placement.rows_per_pair

    def _mlp(self, layer: int) -> Any:
        return self._weights["layers"][self.model.moe_layers[layer]]["mlp"]

    def _experts_of(self, layer: int) -> tuple[jax.Array, jax.Array]:
        mlp = self._mlp(layer)
        return mlp["gate_up"].get_value(), mlp["down"].get_value()


def _shape_of(inputs: StepInputs) -> tuple[int, int]:
    return inputs.tokens_ST.shape[1], inputs.count_SG.shape[1]
