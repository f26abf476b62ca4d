"""The devices: a model on a mesh, compiled for every bucket before it serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.exceptions import DevicesLost
from gimbal_jax.model.experts import exchange_table, move_experts
from gimbal_jax.model.inputs import Bucket, StepOutputs, StepShape, empty_inputs, step_shape
from gimbal_jax.model.sharding import put
from gimbal_jax.model.step import (
    COMPILER_OPTIONS,
    DeviceState,
    abstract_model,
    new_state,
    put_by_engine,
    put_new,
    step,
)
from gimbal_jax.model.transformer import StepLayout
from gimbal_jax.pallas_kernels import backend_of
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.serving.engine.plan import Plan, StepResult
from gimbal_jax.serving.engine.runner import Mark, Pending, Progress
from gimbal_jax.serving.runtime.batch import bucket_for, default_rare_inputs, pack_step, step_buckets, unpack_results
from gimbal_jax.serving.runtime.commands import (
    Command,
    Followers,
    Layout,
    Migrate,
    Step,
    TakeCounts,
    engines_by_process,
)
from gimbal_jax.serving.runtime.programs import ProgramCache, compile_programs


class CompileCounter:
    """Counter of the XLA compilations of this process since it was made, by jax's monitoring events."""

    def __init__(self) -> None:
        self.count = 0
        self._lock = threading.Lock()
        jax.monitoring.register_event_duration_secs_listener(self._on_event)

    def _on_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            with self._lock:
                self.count += 1


def _expert_leaf_indices(tree: jax.tree_util.PyTreeDef, model: ModelConfig) -> list[tuple[int, ...]]:
    """Return the places of each MoE layer's expert weights among the leaves of a parameter tree.

    A migration replaces these leaves in the flat list. The places come from a tree of the same structure whose leaves
    are their own indices.
    """
    indices = jax.tree.unflatten(tree, range(tree.num_leaves))["layers"]
    return [
        tuple(indices[layer]["mlp"][name].get_value() for name in ("gate_up", "down")) for layer in model.moe_layers
    ]


class DeviceRunner:
    """A model on a mesh. ``warm_up`` compiles everything that will ever run.

    If the mesh spans several processes, each process has a runner. The leader's runner takes the plans and sends its
    ``followers`` the commands to ``execute``, so all processes run the same programs in the same order.

    ``buckets``: shapes of steps, by rising number of token places.
    ``layout``: what encoding and decoding of commands depends on.
    """

    ahead = 1

    def __init__(
        self,
        model: ModelConfig,
        config: ServerConfig,
        mesh: jax.sharding.Mesh,
        weights: nnx.State,
        slot_of_expert_LE: np.ndarray,
        dtype: Any,
        programs: ProgramCache | None = None,
        followers: Followers | None = None,
    ) -> None:
        """Put the state of a model on the mesh, without compiling.

        ``weights``: parameters with the experts in the slot order of ``slot_of_expert_LE``; shared, not copied. Their
        type may differ from ``dtype`` (see ``pallas_kernels.product``).
        ``dtype``: type of hidden states and KV pages.
        ``programs``: cache of compiled programs; None compiles all.
        ``followers``: the other processes; None if there are none, or if this process is one of them.
        """
        self.model, self.config, self.mesh = model, config, mesh
        self.buckets = step_buckets(config.engine, config.mesh.tp)
        self._programs, self._followers = programs, followers
        self._graph, _ = abstract_model(model, dtype, mesh)
        backend = backend_of(mesh.devices.flat[0])
        self._layout = StepLayout(mesh, config.engine.tile, config.engine.exchange, backend)

        # A step is called with a flat tuple of parameters, because flattening those of a deep model takes milliseconds.
        self._leaves, self._tree = jax.tree.flatten(weights)
        self._expert_leaves = _expert_leaf_indices(self._tree, model)

        # The placement, on the host and on the devices.
        self._slots = np.array(slot_of_expert_LE, np.int32)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._device_slots = put(self._slots, self._replicated)

        # Inputs and state of the steps.
        self._by_engine = NamedSharding(mesh, PartitionSpec("dp"))
        self._rare_defaults = put_by_engine(default_rare_inputs(config.engine, model.vocab_size, config.mesh.dp), mesh)
        self.layout = Layout(self._shape, self._rare_defaults, engines_by_process(mesh))
        self._state: DeviceState = new_state(model, config.engine, dtype, mesh)
        self.expert_bytes = sum(array.nbytes for array in self._experts_of(0)) // model.num_experts

        # Compiled programs, which ``warm_up`` makes.
        self._steps: dict[Bucket, jax.stages.Compiled] = {}
        self._move_experts: jax.stages.Compiled | None = None
        self._swap_counts: jax.stages.Compiled | None = None
        self._compilations = CompileCounter()
        self._compiled_at_warmup: int | None = None  # None until warm-up is over

    @property
    def slot_of_expert_LE(self) -> np.ndarray:
        """The placement that the next step will use; read-only."""
        return self._slots

    @property
    def weights(self) -> nnx.State:
        """Parameters, with the experts in slot order."""
        return jax.tree.unflatten(self._tree, self._leaves)

    def warm_up(self, progress: Progress | None = None) -> None:
        """Compile all buckets, the migration and the counter reset, then run each once on empty inputs.

        An error of ``progress`` ends the warm-up as soon as the programs that are being compiled are done.
        """
        # How to lower each program.
        nowhere = np.zeros(0, np.int32)
        table = self._table(Round(nowhere, nowhere, nowhere))
        counts = self._state.counts_STLE
        swap = jax.jit(
            lambda counts: (counts, jnp.zeros_like(counts)),
            out_shardings=(self._for_host or counts.sharding, counts.sharding),
        )
        move = jax.jit(partial(move_experts, mesh=self.mesh), donate_argnums=0)
        lowerers: dict[Bucket | str, Callable[[], jax.stages.Lowered]] = {
            bucket: partial(self._lower, bucket) for bucket in self.buckets
        }
        lowerers |= {"move": partial(move.lower, self._experts_of(0), *table), "swap": partial(swap.lower, counts)}

        # Compile them all, or take them from the cache.
        programs = compile_programs(lowerers, self._programs, COMPILER_OPTIONS, progress)
        self._move_experts, self._swap_counts = programs["move"], programs["swap"]
        self._steps = {bucket: programs[bucket] for bucket in self.buckets}

        # The first run of a program is slow, so run each once.
        for bucket in self.buckets:
            nothing = Step(bucket, empty_inputs(self.config.mesh.dp, self._shape(bucket)), self._rare_defaults)
            jax.device_get(self._run_step(nothing).token_SC)
        # Static placement has no memory for the buffers of moves (see ``model.memory.device_bytes``).
        if self.config.placement.policy != "static":
            for layer in range(len(self.model.moe_layers)):
                self._migrate(layer, Round(nowhere, nowhere, self._slots[layer]))
        jax.device_get(self._take_counts())
        self._compiled_at_warmup = self._compilations.count

    def execute(self, command: Command) -> None:
        """Run a command of the leader."""
        match command:
            case Step():
                self._run_step(command)
            case TakeCounts():
                self._take_counts()
            case Migrate(layer, moves):
                self._migrate(layer, moves)

    def enqueue(self, plans: Sequence[Plan], mark: Mark) -> Pending:
        """Implement ``Runner.enqueue``."""
        # Lay out the plans as arrays of the smallest bucket that fits.
        bucket = bucket_for(plans, self.buckets)
        shape = self._shape(bucket)
        packed_SX, rare = pack_step(plans, shape, self._rare_defaults)
        mark("batch")

        # Start the step in all processes.
        step = Step(bucket, packed_SX, rare)
        self._broadcast(step)
        outputs = self._run_step(step)

        # Start to copy the results that requests want.
        if not any(plan.logprobs for plan in plans):
            outputs = replace(outputs, logprobs=None)
        if rare.want_targets is self._rare_defaults.want_targets:
            outputs = replace(outputs, prompt_logprobs=None)
        for array in jax.tree.leaves(outputs):
            array.copy_to_host_async()

        def pending() -> list[StepResult]:
            try:
                ready = jax.device_get(outputs)
            except Exception as error:
                cause = error if self._followers is None else self._followers.explain(error)
                if cause is error:
                    raise
                raise cause from error
            return [unpack_results(ready, plan, s, shape) for s, plan in enumerate(plans)]

        return pending

    def begin_counts(self) -> Callable[[], np.ndarray]:
        """Implement ``Runner.begin_counts``."""
        self._broadcast(TakeCounts())
        counts_STLE = self._take_counts()
        counts_STLE.copy_to_host_async()
        return lambda: np.asarray(counts_STLE).astype(np.int64).sum(axis=1).transpose(1, 0, 2)

    def migrate(self, layer: int, moves: Round) -> None:
        """Implement ``Runner.migrate``."""
        self._table(moves)  # raises before any process has moved an expert
        self._broadcast(Migrate(layer, moves))
        self._migrate(layer, moves)

    def _migrate(self, layer: int, moves: Round) -> None:
        assert self._move_experts is not None, "warm_up comes first"
        table = self._table(moves)
        slots = self._slots.copy()
        slots[layer] = moves.slot_of_expert_E
        device_slots = put(slots, self._replicated)
        experts = self._experts_of(layer)
        try:
            moved = self._move_experts(experts, *table)
        except Exception as error:
            # With several processes it is unknown whether the others failed too.
            if self._for_host or any(array.is_deleted() for array in experts):
                raise DevicesLost(f"the experts of MoE layer {layer} were lost while they moved: {error}") from error
            raise
        # Nothing below can fail, so weights and table change together.
        for number, array in zip(self._expert_leaves[layer], moved, strict=True):
            self._leaves[number] = array
        self._slots, self._device_slots = slots, device_slots

    def compiles_after_warmup(self) -> int:
        """Return the programs that all processes compiled since warm-up; 0 until warm-up is over."""
        own = 0 if self._compiled_at_warmup is None else self._compilations.count - self._compiled_at_warmup
        return own + (self._followers.compiles_after_warmup() if self._followers else 0)

    def _broadcast(self, command: Command) -> None:
        if self._followers is not None:
            self._followers.send(command, self.layout)

    @property
    def _for_host(self) -> NamedSharding | None:
        """Sharding of arrays that the host reads, if the mesh spans several processes; None if it does not."""
        return None if self._replicated.is_fully_addressable else self._replicated

    def _run_step(self, step: Step) -> StepOutputs:
        inputs = step.packed_SX, step.rare
        if self._for_host:  # a program of several processes does not take arrays of the host
            inputs = put_by_engine(step.packed_SX, self.mesh), put_new(step.rare, self._rare_defaults, self.mesh)
        outputs, self._state = self._steps[step.bucket](tuple(self._leaves), self._state, self._device_slots, *inputs)
        return outputs

    def _take_counts(self) -> jax.Array:
        """Return the counters [S, T, L, E] since the last call, and reset them."""
        assert self._swap_counts is not None, "warm_up comes first"
        counts_STLE, zeros_STLE = self._swap_counts(self._state.counts_STLE)
        self._state = replace(self._state, counts_STLE=zeros_STLE)
        return counts_STLE

    def _lower(self, bucket: Bucket) -> jax.stages.Lowered:
        shape = self._shape(bucket)

        def run(leaves: tuple[jax.Array, ...], *rest: Any) -> tuple[StepOutputs, DeviceState]:
            return step(self._graph, self._layout, shape, jax.tree.unflatten(self._tree, leaves), *rest)

        packed_SX = jax.ShapeDtypeStruct((self.config.mesh.dp, shape.packed), np.int32, sharding=self._by_engine)
        arguments = tuple(self._leaves), self._state, self._device_slots, packed_SX, self._rare_defaults
        return jax.jit(run, donate_argnums=1, out_shardings=(self._for_host, None)).lower(*arguments)

    def _shape(self, bucket: Bucket) -> StepShape:
        return step_shape(self.config.engine, bucket)

    def _table(self, moves: Round) -> tuple[np.ndarray, np.ndarray]:
        """Return the exchange table of a round. Raises ValueError if the round moves too many experts."""
        sizes = self.model.num_experts, self.config.mesh.ranks, self.config.placement.rows_per_pair
        return exchange_table(moves.src_slot, moves.dst_slot, *sizes)

    def _experts_of(self, layer: int) -> tuple[jax.Array, ...]:
        return tuple(self._leaves[number] for number in self._expert_leaves[layer])
