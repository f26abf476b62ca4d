"""A runner without a model: routing and tokens follow from the token ids alone, and it fails when told to."""

from collections.abc import Sequence

import numpy as np

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.serving.plan import Chunk, NextToken, Plan
from gimbal_jax.serving.request import TokenLogprobs


class FakeRunner:
    """Each token is the one before plus one. Token t goes to the experts t, t + 1, ... of every layer."""

    def __init__(self, model: ModelConfig, config: ServerConfig) -> None:
        self.model, self.config = model, config
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

    def step(self, plans: Sequence[Plan]) -> list[list[NextToken | None]]:
        if self.steps_left == 0:
            self.broken = True
            raise RuntimeError("device lost")
        if self.steps_left is not None:
            self.steps_left -= 1
        experts = self.model.num_experts
        for s, plan in enumerate(plans):
            for chunk in plan.chunks:
                for choice in range(self.model.experts_per_token):
                    self.counts_LSE[:, s] += np.bincount((chunk.tokens + choice) % experts, minlength=experts)
        return [[self._next_token(chunk) for chunk in plan.chunks] for plan in plans]

    def _next_token(self, chunk: Chunk) -> NextToken | None:
        if chunk.sampling is None:
            return None
        token_id = int(chunk.tokens[-1] + 1) % self.model.vocab_size
        if chunk.sampling.logprobs is None:
            return NextToken(token_id)
        wanted = chunk.sampling.logprobs
        return NextToken(token_id, TokenLogprobs(0.0, (0,) * wanted, (0.0,) * wanted))

    def take_counts(self) -> np.ndarray:
        if self.broken:
            raise RuntimeError("the counters are gone")
        counts_LSE, self.counts_LSE = self.counts_LSE, np.zeros_like(self.counts_LSE)
        return counts_LSE

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
