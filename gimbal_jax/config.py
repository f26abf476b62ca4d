"""Every setting of the system, as frozen dataclasses. Standard library only.

A policy is chosen by its name in one of these records; nothing else in the
package is configurable. Units are in the names (``_s`` seconds) or docstrings.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

DispatchPolicy = Literal[
    "gimbal",
    "late",
    "round_robin",
    "power_of_two",
    "vllm_classic",
    "vllm_0_33",
    "sglang_total_tokens",
    "tpu_inference",
]
PressureForm = Literal["sum", "max"]
QueuePolicy = Literal["sjf_aging", "fcfs", "hrrn", "priority"]
PlacementPolicy = Literal["gimbal", "gimbal_refined", "gimbal_uncalibrated", "eplb", "eplb_hierarchical", "static"]
OfflinePolicy = Literal["moetuner", "sem_moe"]
"""Policies that need a profile, not a window: for ``gimbal place``."""
LoadTerm = Literal["square", "max"]
Exchange = Literal["gather", "sparse"]

MAX_LOGPROBS = 20
"""Most alternatives per token that a request can ask for; the step always computes as many."""
MAX_STOP_IDS = 16
"""Most stop token ids of one request, the model's own end tokens included."""
MAX_LOGIT_BIAS = 300
"""Most tokens that one request can bias, as in OpenAI's API."""
MEMORY_UTILISATION = 0.9
"""Share of each GPU's memory that a server takes; the rest is for CUDA, its libraries and compiled code."""
MAX_PRIORITY = 100
"""Priorities of requests are -MAX_PRIORITY to MAX_PRIORITY; lower runs first."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding; ``kind`` and its parameters as in Hugging Face's ``rope_parameters``."""

    theta: float = 1_000_000.0
    kind: Literal["default", "linear", "yarn", "llama3"] = "default"
    factor: float = 1.0
    original_max_position: int | None = None
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a Qwen3-MoE checkpoint (Hugging Face's ``Qwen3MoeConfig``)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_experts: int
    experts_per_token: int
    moe_intermediate_size: int
    moe_layers: tuple[int, ...]
    """Indices of the layers that hold experts, rising; the others are dense."""
    norm_topk_prob: bool = True
    tie_embeddings: bool = False
    attention_bias: bool = False
    sliding_window: int | None = None
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    max_position: int = 32768
    dtype: str = "bfloat16"
    """Of hidden states and KV pages."""
    weights_dtype: str = "bfloat16"
    """Of weights: ``dtype``, or a smaller one that they lose nothing by."""
    bos_token_id: int | None = None
    pad_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class MeshConfig:
    """``dp`` engines of ``tp`` devices each; experts are spread over all ``dp * tp`` ranks."""

    dp: int = 1
    tp: int = 1
    nodes: int = 1
    """Machines that the ranks are spread over, evenly and in order."""

    @property
    def ranks(self) -> int:
        """Expert-parallel ranks R; rank ``r`` belongs to source ``r // tp``."""
        return self.dp * self.tp

    @property
    def ranks_per_node(self) -> int:
        """Rank ``r`` is on node ``r // ranks_per_node``."""
        return self.ranks // self.nodes


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one DP engine. All engines are alike."""

    max_model_len: int = 4096
    """Most tokens of one sequence, prompt and output together."""
    page_size: int = 16
    """Tokens per KV page."""
    num_pages: int = 1024
    """KV pages per engine; `gimbal serve` sizes them by the memory of GPUs (see ``serving.kv_pool``)."""
    max_rows: int = 32
    """Most sequences that run at once."""
    token_budget: int = 512
    """Most tokens in one step, decode and prefill together (T_ref of dispatch)."""
    tile: int = 32
    """Prefill tokens are laid out in tiles of this many tokens of one sequence."""
    max_queue: int = 256
    """Most requests that wait; one more is refused."""
    exchange: Exchange = "gather"
    prefix_cache: bool = True
    """Whether sequences share the KV pages of common beginnings. Not in the paper, so its experiments go without."""

    @property
    def pages_per_row(self) -> int:
        return -(-self.max_model_len // self.page_size)


GPU_ENGINE = EngineConfig(page_size=64, max_rows=128, token_budget=8192, tile=64)
"""Where the user says nothing else on GPUs: 8,192 tokens a step as in the paper. ``EngineConfig()`` is for CPUs."""


@dataclass(frozen=True)
class DispatchConfig:
    """Which engine gets a request (paper 4.2 and 4.3)."""

    policy: DispatchPolicy = "gimbal"
    trace_period_s: float = 0.1
    """Engines publish their trace this often."""
    trace_max_age_s: float = 1.0
    """An older trace counts as missing."""
    high_kv: float = 0.90
    kv_gap: float = 0.10
    """Above the first, and with engines this far apart, KV use alone decides."""
    lambda_kv: float = 1.0
    lambda_moe: float = 1.0
    """Weights of KV use and of excess expert pressure in the score, each times the token budget."""
    expert_pressure: PressureForm = "sum"
    """Pressure of an engine's ranks: what they process together, or what the fullest of them does, layer by layer."""
    close_scores: float = 0.37
    """Scores within this share of the token budget are equal (3,000 of 8,192 tokens in the paper)."""


@dataclass(frozen=True)
class QueueConfig:
    """Which request an engine runs first (paper 4.4)."""

    policy: QueuePolicy = "sjf_aging"
    aging_s: float = 5.0
    """A request that waited longer goes before all younger ones (``sjf_aging``; ``priority``: of its priority)."""


@dataclass(frozen=True)
class PlacementConfig:
    """Which rank holds each expert (paper 5), and how fast experts move.

    ``alpha``, ``beta``, ``gamma`` weigh communication, load and moves (see ``Objective``).
    The paper's (1, 0.0025, 1) is for another normalisation; here it leaves the load nearly as uneven
    as it was. By the paper's criterion (section 6) ``python research/calibrate_placement.py`` finds
    (1, 0.2, 0.1). The default weighs load more, since locality that one window shows is partly chance:
    later windows are more even under it, and within a node only even loads save time
    (tests/scheduler/test_unseen_windows.py).
    """

    policy: PlacementPolicy = "gimbal"
    alpha: float = 1.0
    beta: float = 1.0
    gamma: float = 0.1
    far_distance: float = 9.0
    """Distance of a rank on another node, in units of one of another source on the same node. The default is an H100's
    NVLink, 450 GB/s, over its share of the network, a 400 Gb/s card."""
    load_term: LoadTerm = "square"
    """How uneven rank loads count: by the mean square of their deviations, or by the fullest rank alone."""
    min_gain: float = 0.02
    """A new placement is applied only if it lowers the objective by more than this share.

    The noise of a short window promises a gain too, of a few percent: below it moves chase noise."""
    window_steps: int = 200
    """Steps over which traffic is counted before each decision."""
    smoothing: float = 0.5
    """Weight, from 0 to below 1, that earlier traffic keeps from one window to the next when a policy decides.

    0 decides by the last window alone, whose noise then moves more than twice as many experts for no
    better balance (tests/scheduler/test_unseen_windows.py). Ours."""
    rows_per_pair: int = 2
    """Experts that one migration call may move from any rank to any other."""
    migrate_bytes_per_tick: int = 64 * 2**20
    """Expert bytes moved between two steps, at most (at least one call is made)."""


@dataclass(frozen=True)
class NetworkConfig:
    """Where the gRPC server listens, who may call it, and how much one client may ask for."""

    host: str = "127.0.0.1"
    port: int = 50051
    """0 takes a free one."""
    tls_cert: Path | None = None
    """PEM chain of the server; with ``tls_key`` it serves TLS only."""
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    """PEM of the authorities whose clients may connect: mutual TLS."""
    api_keys: Path | None = None
    """File of bearer tokens; without one every client may call."""
    max_message_mib: int = 16
    """Longest message that a client may send."""
    max_streams_per_client: int = 256
    """Most requests of one client at once."""


@dataclass(frozen=True)
class ServerConfig:
    """All that decides how one server computes."""

    mesh: MeshConfig = MeshConfig()
    engine: EngineConfig = field(default_factory=EngineConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    queue: QueueConfig = field(default_factory=QueueConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
