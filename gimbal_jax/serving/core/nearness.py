"""Which tokens the sources computed, and what their traffic teaches about where prompts are near their experts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from gimbal_jax.config import ServerConfig
from gimbal_jax.scheduler import affinity
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.serving.engine.plan import ON_DEVICE, Plan, StepResult


class Nearness:
    """The profile of ``scheduler.affinity`` and the steps that it has not learned from yet. The engine thread's own."""

    def __init__(self, config: ServerConfig) -> None:
        mesh = config.mesh
        self.table_BS: np.ndarray | None = None
        """How far prompts are from their experts (see ``affinity.table_BS``), replaced whole; None until it is known.
        For any thread."""
        self._sources = mesh.dp
        self._distance_SR = distance_SR(mesh, config.placement.far_distance)
        self._profile = affinity.new_profile(mesh.dp)
        self._slot_of_expert_LE: np.ndarray | None = None
        self._last_SR = np.zeros((mesh.dp, config.engine.max_rows), np.int32)
        """The token that each engine row chose last, as the devices keep it."""
        self._steps: deque[list[np.ndarray]] = deque()
        """Of each step not learned from: its tokens, as ``source * BUCKETS + bucket``."""

    def fetched(self, plans: Sequence[Plan], results: Sequence[StepResult]) -> None:
        """The results of the next step are there, and so are all tokens that it computed."""
        places = []
        for s, (plan, result) in enumerate(zip(plans, results, strict=True)):
            decode, last_R = plan.decode, self._last_SR[s]
            token_D = np.where(decode.token_D == ON_DEVICE, last_R[decode.row_D], decode.token_D)
            for tokens in (token_D, *(chunk.tokens for chunk in plan.prefill)):
                places.append(affinity.bucket_of(tokens) + s * affinity.BUCKETS)
            last_R[decode.row_D] = result.token_D
            last_R[[chunk.row for chunk in plan.prefill]] = result.token_C
        self._steps.append(places)

    def learn(self, counts_LSE: np.ndarray, steps: int, slot_of_expert_LE: np.ndarray) -> None:
        """Learn from the counts of the oldest ``steps`` steps, priced under the placement now in force."""
        if not steps:
            return
        moved = slot_of_expert_LE is not self._slot_of_expert_LE
        if moved:
            self._slot_of_expert_LE = slot_of_expert_LE
            self._distance_LES = affinity.distance_LES(slot_of_expert_LE, self._distance_SR)
        places = np.concatenate([tokens for _ in range(steps) for tokens in self._steps.popleft()])
        tokens_SB = np.bincount(places, minlength=self._sources * affinity.BUCKETS).reshape(self._sources, -1)
        self._profile = affinity.learn(
            self._profile, tokens_SB.astype(np.float32), counts_LSE, self._distance_LES, moved
        )
        self.table_BS = affinity.table_BS(self._profile)
