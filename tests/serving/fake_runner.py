"""A runner without a model: routing and tokens follow from the token ids alone, and it fails when told to."""

import numpy as np

from gimbal_jax.config import ModelConfig, ServerConfig
from gimbal_jax.model.inputs import StepInputs, StepOutputs, rows_and_tiles
from gimbal_jax.scheduler.migration import Round
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.serving.batch import step_buckets


class FakeRunner:
    """Each token is the one before plus one. Token t goes to the experts t, t + 1, ... of every layer."""

    def __init__(self, model: ModelConfig, config: ServerConfig) -> None:
        self.model, self.config = model, config
        self.buckets = step_buckets(config.engine, config.mesh.tp)
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

    def step(self, inputs: StepInputs) -> StepOutputs:
        if self.steps_left == 0:
            self.broken = True
            raise RuntimeError("device lost")
        if self.steps_left is not None:
            self.steps_left -= 1
        tokens_ST, count_SG = np.asarray(inputs.tokens_ST), np.asarray(inputs.count_SG)
        real_ST = np.asarray(inputs.write_ST) < self.config.engine.num_pages * self.config.engine.page_size
        experts = self.model.num_experts
        for s, (tokens_T, real_T) in enumerate(zip(tokens_ST, real_ST, strict=True)):
            for choice in range(self.model.experts_per_token):
                self.counts_LSE[:, s] += np.bincount((tokens_T[real_T] + choice) % experts, minlength=experts)
        rows, tiles = rows_and_tiles(tokens_ST.shape[1], count_SG.shape[1], self.config.engine.tile)
        first_G = np.concatenate([np.arange(rows), rows + self.config.engine.tile * np.arange(tiles)])
        last_SG = first_G + np.maximum(count_SG - 1, 0)
        token_SG = (np.take_along_axis(tokens_ST, last_SG, axis=1) + 1) % self.model.vocab_size
        top_SGK = np.zeros((*token_SG.shape, 20), np.int32)
        return StepOutputs(token_SG, np.zeros(token_SG.shape), top_SGK, top_SGK.astype(float))

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
