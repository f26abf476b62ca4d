"""A runner without a model: routing and tokens follow from the token ids alone, and it fails when told to."""

from collections.abc import Callable, Sequence

import numpy as np

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.serving.engine.plan import ON_DEVICE, Plan, StepResult
from gimbal_jax.serving.engine.request import TokenLogprobs
from gimbal_jax.serving.engine.runner import Mark, Pending


class FakeRunner:
    """Each token is the one before plus one. Token t goes to the experts t, t + 1, ... of every layer."""

    def __init__(self, model: ModelConfig, config: ServerConfig, ahead: int = 0) -> None:
        self.model, self.config, self.ahead = model, config, ahead
        self.expert_bytes = 100
        layers = len(model.moe_layers)
        self.slot_of_expert_LE = static_placement(layers, model.num_experts, config.mesh.ranks)
        self.counts_LSE = np.zeros((layers, config.mesh.dp, model.num_experts), np.int64)
        self.steps_left: int | None = None
        """Steps that succeed before one fails, and takes the counters with it; None if none fails."""
        self.broken = False
        self.migrated: list[tuple[int, Round]] = []
        self.migrations_left: int | None = None
        """Migrations that succeed before one fails; None if none fails."""
        self.enqueued = self.fetched = 0
        self.on_wait: Callable[[list[StepResult]], None] | None = None
        """Called with the results of a step when the host waits for it; may wait, raise or change them."""
        self._last_SR = np.zeros((config.mesh.dp, config.engine.max_rows), np.int32)

    def enqueue(self, plans: Sequence[Plan], mark: Mark) -> Pending:
        mark("batch")
        self.enqueued += 1
        results = [self._run(s, plan) for s, plan in enumerate(plans)]

        def pending() -> list[StepResult]:
            """Fails here, as devices do: while the host waits for them."""
            if self.on_wait is not None:
                self.on_wait(results)
            if self.steps_left == 0:
                self.broken = True
                raise RuntimeError("device lost")
            if self.steps_left is not None:
                self.steps_left -= 1
            self.fetched += 1
            return results

        return pending

    def begin_counts(self) -> Callable[[], np.ndarray]:
        if self.broken:
            raise RuntimeError("the counters are gone")
        counts_LSE, self.counts_LSE = self.counts_LSE, np.zeros_like(self.counts_LSE)
        steps = self.enqueued

        def counts() -> np.ndarray:
            assert self.fetched >= steps, "this would wait for the devices"
            return counts_LSE

        return counts

    def migrate(self, layer: int, moves: Round) -> None:
        if self.migrations_left == 0:
            raise RuntimeError("link down")
        if self.migrations_left is not None:
            self.migrations_left -= 1
        self.slot_of_expert_LE = self.slot_of_expert_LE.copy()
        self.slot_of_expert_LE[layer] = moves.slot_of_expert_E
        self.migrated.append((layer, moves))

    def compiles_after_warmup(self) -> int:
        return 0

    def _run(self, s: int, plan: Plan) -> StepResult:
        decode, last_R, experts = plan.decode, self._last_SR[s], self.model.num_experts
        token_D = np.where(decode.token_D == ON_DEVICE, last_R[decode.row_D], decode.token_D)
        for tokens in [token_D, *(chunk.tokens for chunk in plan.prefill)]:
            for choice in range(self.model.experts_per_token):
                self.counts_LSE[:, s] += np.bincount((tokens + choice) % experts, minlength=experts)
        next_D = ((token_D + 1) % self.model.vocab_size).astype(np.int32)
        next_C = np.array([(chunk.tokens[-1] + 1) % self.model.vocab_size for chunk in plan.prefill], np.int32)
        last_R[decode.row_D] = next_D
        for chunk, token in zip(plan.prefill, next_C, strict=True):
            if chunk.sampling is not None:
                last_R[chunk.row] = token
        logprobs = {row: TokenLogprobs(0.0, (0,) * count, (0.0,) * count) for _, row, count in plan.logprobs}
        nothing = TokenLogprobs(0.0, (), ())
        targets = {c.row: (nothing,) * len(c.targets) for c in plan.prefill if c.targets is not None}
        return StepResult(next_D, next_C, logprobs, targets)
