"""The devices, simulated: steps route by a bank, count as the real ones do, and take the time that they cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from gimbal_jax.config import ServerConfig
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.serving.plan import Chunk, NextToken, Plan
from gimbal_jax.simulation.clock import VirtualClock
from gimbal_jax.simulation.routing import BLOCK_TOKENS, Router
from gimbal_jax.simulation.work import Costs, EngineWork, StepWork


class SimulatedRunner:
    """A ``Runner`` on a virtual clock. No token ends an output: lengths come with the requests."""

    def __init__(
        self,
        config: ServerConfig,
        slot_of_expert_LE: np.ndarray,
        router: Router,
        costs: Costs,
        clock: VirtualClock,
        rng: np.random.Generator,
        expert_bytes: int,
        overlapped: bool = False,
        on_step: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """``overlapped``: experts move beside the steps; see ``Costs.migration_seconds``.

        ``on_step`` is called with the seconds of a step when they have passed.
        """
        self.expert_bytes = expert_bytes
        self.seconds: Counter[str] = Counter()
        """Time that passed in steps, by part, and in migrations."""
        self.steps = 0
        self.pairs = 0
        """(token, choice) pairs of all layers so far."""
        self.remote_pairs = 0
        """Those of them that left their source's ranks."""
        self.fullest_pairs = 0
        """Pairs of the fullest rank of each layer and step, added up: times ranks over ``pairs`` is the imbalance."""
        self._config, self._router, self._costs, self._clock, self._rng = config, router, costs, clock, rng
        self._overlapped, self._on_step = overlapped, on_step
        self._slots_LE = slot_of_expert_LE.astype(np.int32)
        self._expert_of_slot_LP = np.argsort(self._slots_LE, axis=1)
        self._shape = len(slot_of_expert_LE), config.mesh.dp, slot_of_expert_LE.shape[1]
        self._counts_LSE = np.zeros(self._shape, np.int64)

    @property
    def slot_of_expert_LE(self) -> np.ndarray:
        return self._slots_LE

    def step(self, plans: Sequence[Plan]) -> list[list[NextToken | None]]:
        counts_LSE = self._route(plans)
        self._counts_LSE += counts_LSE
        pairs_LSP = np.take_along_axis(counts_LSE, self._expert_of_slot_LP[:, None], axis=2)
        work = StepWork(tuple(_work(plan) for plan in plans), pairs_LSP, self._config.mesh.ranks)
        self._add_up(work)
        parts = self._costs.step_parts(work)
        self.seconds.update(parts)
        self.steps += 1
        seconds = sum(parts.values())
        self._clock.advance(seconds)
        self._on_step(seconds)
        return [[self._next_token(chunk) for chunk in plan.chunks] for plan in plans]

    def take_counts(self) -> np.ndarray:
        counts_LSE, self._counts_LSE = self._counts_LSE, np.zeros(self._shape, np.int64)
        return counts_LSE

    def migrate(self, layer: int, moves: Round) -> None:
        seconds = self._costs.migration_seconds(moves, self._overlapped)
        self.seconds["migration"] += seconds
        self._clock.advance(seconds)
        self._slots_LE = self._slots_LE.copy()
        self._slots_LE[layer] = moves.slot_of_expert_E
        self._expert_of_slot_LP[layer] = np.argsort(moves.slot_of_expert_E)

    def compiles_after_warmup(self) -> int:
        return 0

    def _route(self, plans: Sequence[Plan]) -> np.ndarray:
        """Expert tokens [L, S, E] of all chunks: whole blocks of long ones, token by token what is left."""
        router, now = self._router, self._clock.now
        blocks_LSE = np.zeros(self._shape, np.int64)
        profiles: list[int] = []
        sources: list[int] = []
        for s, plan in enumerate(plans):
            for chunk in plan.chunks:
                profile = router.profile(int(chunk.tokens[0]), s, now)
                blocks, rest = divmod(len(chunk.tokens), BLOCK_TOKENS)
                if blocks:
                    blocks_LSE[:, s] += router.count_blocks(profile, blocks, self._rng)
                profiles += [profile] * rest
                sources += [s] * rest
        if profiles:
            dp = self._config.mesh.dp
            blocks_LSE += router.count_tokens(np.array(profiles), np.array(sources), dp, self._rng)
        return blocks_LSE

    def _add_up(self, work: StepWork) -> None:
        tp, sources = self._config.mesh.tp, self._config.mesh.dp
        pairs = int(work.load_LR.sum())
        local_LS = work.pairs_LSR.reshape(-1, sources, sources, tp).diagonal(axis1=1, axis2=2)
        self.pairs += pairs
        self.remote_pairs += pairs - int(local_LS.sum())
        self.fullest_pairs += int(work.load_LR.max(axis=1).sum())

    def _next_token(self, chunk: Chunk) -> NextToken | None:
        return None if chunk.sampling is None else NextToken(self._router.output_token(int(chunk.tokens[-1])))


def _work(plan: Plan) -> EngineWork:
    return EngineWork(
        decode_contexts=np.array([chunk.start + 1 for chunk in plan.decode], np.int64),
        prefill=tuple((chunk.start, len(chunk.tokens)) for chunk in plan.prefill),
        chosen=sum(chunk.sampling is not None for chunk in plan.chunks),
    )
