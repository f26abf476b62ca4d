"""What is compared with what: a system is a configuration, never a branch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gimbal_jax.config import DispatchConfig, OfflinePolicy, PlacementConfig, QueueConfig

Migration = Literal["between_steps", "blocking", "overlapped"]


@dataclass(frozen=True)
class System:
    """The policies of one server, and when its placement acts."""

    name: str
    summary: str
    dispatch: DispatchConfig
    queue: QueueConfig
    placement: PlacementConfig
    migration: Migration = "between_steps"
    """``between_steps``: some rounds after each step (ours). ``blocking``: decision and all moves at once, while
    all engines wait (vLLM in the paper's time). ``overlapped``: weights travel beside the steps (vLLM 0.33)."""
    first_window_steps: int | None = None
    """Steps before the first decision, where they differ from ``placement.window_steps``."""
    offline: OfflinePolicy | None = None
    """Experts, and for ``sem_moe`` requests too, are placed before the run by a profile."""
