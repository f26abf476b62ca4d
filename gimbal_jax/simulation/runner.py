"""Simulated devices. Steps route tokens by a bank, count them as real steps do, and take the time of their price."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np

from gimbal_jax.config import ServerConfig
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.serving.engine.plan import Plan, StepResult
from gimbal_jax.serving.engine.runner import Mark, Pending
from gimbal_jax.simulation.clock import VirtualClock
from gimbal_jax.simulation.routing import BLOCK_TOKENS, Router
from gimbal_jax.simulation.work import Costs, EngineWork, StepWork


class SimulatedRunner:
    """A ``Runner`` on a virtual clock. No token ends an output, because requests have given lengths.

    ``enqueue`` fixes tokens, counts and price of a step. Its time passes when the caller waits for its results.

    Attributes:
      expert_bytes: bytes of one expert of one layer.
      seconds: time that passed in steps, by part, and in migrations.
      steps: number of steps so far.
      pairs: (token, choice) pairs of all layers so far.
      remote_pairs: pairs that left their source's ranks.
      far_pairs: pairs that left their source's node.
      far_bytes: sum of ``Costs.far_bytes`` over the steps.
      fullest_pairs: pairs of the fullest rank, summed over layers and steps. Imbalance is this times ranks / ``pairs``.
    """

    ahead = 0
    """Steps that are enqueued ahead: none, because the prices include the time between steps without overlap."""

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
        on_time: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """Start at the placement ``slot_of_expert_LE``. If ``overlapped``, experts move while steps run.

        ``on_time`` is called with the seconds of each step and of each round of moves, after they have passed.
        """
        self.expert_bytes = expert_bytes
        self.seconds: Counter[str] = Counter()
        self.steps = 0
        self.pairs = 0
        self.remote_pairs = 0
        self.far_pairs = 0
        self.far_bytes = 0.0
        self.fullest_pairs = 0
        self._config, self._router, self._costs, self._clock, self._rng = config, router, costs, clock, rng
        self._overlapped, self._on_time = overlapped, on_time
        node_R = np.arange(config.mesh.ranks) // config.mesh.ranks_per_node
        # Source s has the node of its first rank.
        self._far_SR = node_R[:: config.mesh.tp, None] != node_R
        self._slots_LE = slot_of_expert_LE.astype(np.int32)
        self._expert_of_slot_LP = np.argsort(self._slots_LE, axis=1)
        self._counts_LSE = self._no_counts()
        # Output token after each token id, to look up a whole batch.
        self._after = np.array([router.output_token(token_id) for token_id in range(router.token_ids)], np.int32)

    @property
    def slot_of_expert_LE(self) -> np.ndarray:
        return self._slots_LE

    def enqueue(self, plans: Sequence[Plan], mark: Mark) -> Pending:
        # Route and count with the placement before the step, then price its work.
        counts_LSE = self._route(plans)
        self._counts_LSE += counts_LSE
        work = StepWork(tuple(engine_work(plan) for plan in plans), self._by_slot(counts_LSE), self._config.mesh.ranks)
        mark("batch")
        self._add_up(work)
        parts = self._costs.step_parts(work)
        self.seconds.update(parts)
        self.steps += 1
        results, seconds = [self._result(plan) for plan in plans], sum(parts.values())

        def pending() -> list[StepResult]:
            self._clock.advance(seconds)
            self._on_time(seconds)
            return results

        return pending

    def begin_counts(self) -> Callable[[], np.ndarray]:
        counts_LSE, self._counts_LSE = self._counts_LSE, self._no_counts()
        return lambda: counts_LSE

    def migrate(self, layer: int, moves: Round) -> None:
        seconds = self._costs.migration_seconds(moves, self._overlapped)
        self.seconds.update({"migration": seconds})
        self._clock.advance(seconds)
        self._on_time(seconds)
        self._slots_LE = self._slots_LE.copy()
        self._slots_LE[layer] = moves.slot_of_expert_E
        self._expert_of_slot_LP[layer] = np.argsort(moves.slot_of_expert_E)

    def compiles_after_warmup(self) -> int:
        return 0

    def _no_counts(self) -> np.ndarray:
        """Return zeros [L, S, E]. In memory the sources are outermost, the order in which they are counted."""
        layers, experts = self._slots_LE.shape
        return np.zeros((self._config.mesh.dp, layers, experts), np.int64).swapaxes(0, 1)

    def _route(self, plans: Sequence[Plan]) -> np.ndarray:
        """Return the expert tokens [L, S, E] of all chunks and decode rows, in blocks and for the rest by token."""
        router, now = self._router, self._clock.now
        blocks_G: list[tuple[int, np.ndarray]] = []
        token_ids: list[int] = []
        sources: list[int] = []
        for s, plan in enumerate(plans):
            for chunk in plan.prefill:
                # All tokens of a prompt have one id, so whole blocks stand for most of a chunk.
                token_id = int(chunk.tokens[0])
                blocks, rest = divmod(len(chunk.tokens), BLOCK_TOKENS)
                if blocks:
                    blocks_G.append((s, router.count_blocks(router.profile(token_id, s, now), blocks, self._rng)))
                token_ids += [token_id] * rest
                sources += [s] * rest
            token_ids += plan.decode.token_D.tolist()
            sources += [s] * len(plan.decode)
        # Count all single tokens together, and then add the blocks.
        source_B = np.array(sources, np.int64)
        profile_B = router.profile(np.array(token_ids, np.int64), source_B, now)
        counts_LSE = router.count_tokens(profile_B, source_B, len(plans), self._rng)
        for s, counts_LE in blocks_G:
            counts_LSE[:, s] += counts_LE
        return counts_LSE

    def _by_slot(self, counts_LSE: np.ndarray) -> np.ndarray:
        """Return expert tokens [L, S, E] by slot [L, S, P]."""
        layers, sources, experts = counts_LSE.shape
        place_LP = np.arange(layers)[:, None] * experts + self._expert_of_slot_LP
        counts_SC = counts_LSE.swapaxes(0, 1).reshape(sources, -1)  # C: places l * E + e
        return counts_SC.take(place_LP, axis=1).swapaxes(0, 1)

    def _add_up(self, work: StepWork) -> None:
        tp, sources = self._config.mesh.tp, self._config.mesh.dp
        pairs = int(work.load_LR.sum())
        local_LS = work.pairs_LSR.reshape(-1, sources, sources, tp).diagonal(axis1=1, axis2=2)
        self.pairs += pairs
        self.remote_pairs += pairs - int(local_LS.sum())
        self.fullest_pairs += int(work.load_LR.max(axis=1).sum())
        if self._config.mesh.nodes > 1:
            self.far_pairs += int(work.pairs_LSR.sum(axis=0)[self._far_SR].sum())
            self.far_bytes += self._costs.far_bytes(work)

    def _result(self, plan: Plan) -> StepResult:
        last_C = np.array([chunk.tokens[-1] for chunk in plan.prefill], np.int32)
        return StepResult(self._after[plan.decode.token_D], self._after[last_C], {}, {})


def engine_work(plan: Plan) -> EngineWork:
    """Return the work of a plan."""
    return EngineWork(
        decode_contexts=plan.decode.start_D.astype(np.int64) + 1,
        prefill=tuple((chunk.start, len(chunk.tokens)) for chunk in plan.prefill),
        chosen=len(plan.decode) + sum(chunk.sampling is not None for chunk in plan.prefill),
    )
