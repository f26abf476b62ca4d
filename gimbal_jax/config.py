"""Every setting of the system, as frozen dataclasses. Standard library only.

Policies are chosen by name in these records. Units are in the names (``_s`` seconds) or in the docstrings.
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
PlacementPolicy = Literal["gimbal", "gimbal_refined", "eplb", "eplb_hierarchical", "static"]
OfflinePolicy = Literal["moetuner", "sem_moe"]
"""Policies that need an offline profile instead of a window, for ``gimbal place``."""
LoadTerm = Literal["square", "max"]
Exchange = Literal["gather", "sparse"]

MAX_LOGPROBS = 20
"""Most alternatives per token that a request can ask for. The step always computes this number."""
MAX_STOP_IDS = 16
"""Most stop token ids of one request, including the model's own end tokens."""
MAX_LOGIT_BIAS = 300
"""Most tokens that one request can bias, as in OpenAI's API."""
MEMORY_UTILISATION = 0.9
"""Share of each GPU's memory that a server uses. The rest is for CUDA, its libraries and compiled code."""
MAX_PRIORITY = 100
"""Limit of request priorities: -MAX_PRIORITY to MAX_PRIORITY, lower runs first."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding, with the parameters of Hugging Face's ``rope_parameters``."""

    theta: float = 1_000_000.0
    """Base of the frequencies."""
    kind: Literal["default", "linear", "yarn", "llama3"] = "default"
    """Scaling of the frequencies (``rope_type``)."""
    factor: float = 1.0
    """Extension of the context by the scaling."""
    original_max_position: int | None = None
    """Positions that the model was trained for before the scaling; None takes ``ModelConfig.max_position``."""
    beta_fast: float = 32.0
    """yarn: rotations over the original context from which a dimension is extrapolated."""
    beta_slow: float = 1.0
    """yarn: rotations over the original context up to which a dimension is interpolated."""
    attention_factor: float | None = None
    """yarn: factor on cosines and sines; None computes it from ``mscale`` and ``mscale_all_dim``, or ``factor``."""
    mscale: float | None = None
    """yarn: weight in the numerator of the attention factor; None if the checkpoint has none."""
    mscale_all_dim: float | None = None
    """yarn: weight in the denominator of the attention factor; None if the checkpoint has none."""
    truncate: bool = True
    """yarn: whether the bounds of the interpolated dimensions are rounded to integers."""
    low_freq_factor: float = 1.0
    """llama3: rotations over the original context below which a dimension is interpolated."""
    high_freq_factor: float = 4.0
    """llama3: rotations over the original context above which a dimension does not change."""


@dataclass(frozen=True)
class ModelConfig:
    """Architecture of a Qwen3-MoE checkpoint (Hugging Face's ``Qwen3MoeConfig``)."""

    vocab_size: int
    """Tokens of the vocabulary."""
    hidden_size: int
    """Width of the hidden states."""
    intermediate_size: int
    """Width of the feed-forward of dense layers."""
    num_layers: int
    """Transformer layers, dense ones included."""
    num_heads: int
    """Query heads."""
    num_kv_heads: int
    """Key and value heads."""
    head_dim: int
    """Width of a head."""
    num_experts: int
    """Experts of each MoE layer."""
    experts_per_token: int
    """Experts that a token chooses in each MoE layer (k)."""
    moe_intermediate_size: int
    """Width of the feed-forward of an expert."""
    moe_layers: tuple[int, ...]
    """Indices of the layers that hold experts, ascending; the other layers are dense."""
    norm_topk_prob: bool = True
    """Whether the weights of a token's experts are normalised to the sum 1."""
    tie_embeddings: bool = False
    """Whether the output layer shares the weights of the token embedding."""
    attention_bias: bool = False
    """Whether the attention projections have biases."""
    sliding_window: int | None = None
    """Latest tokens that attention sees; None if it sees all."""
    rms_norm_eps: float = 1e-6
    """Epsilon of the RMS norms."""
    rope: RopeConfig = RopeConfig()
    """Rotary embedding."""
    max_position: int = 32768
    """Most positions of a sequence."""
    dtype: str = "bfloat16"
    """Dtype of hidden states and KV pages."""
    weights_dtype: str = "bfloat16"
    """Dtype of the weights: ``dtype``, or a narrower one that stores them exactly."""
    bos_token_id: int | None = None
    """Token id of the begin token; None if there is none."""
    pad_token_id: int | None = None
    """Token id of the padding token; None if there is none."""
    eos_token_ids: tuple[int, ...] = ()
    """Token ids that end a sequence; empty if there are none."""


@dataclass(frozen=True)
class MeshConfig:
    """Mesh of ``dp`` engines with ``tp`` devices each. Experts are spread over all ``dp * tp`` ranks."""

    dp: int = 1
    """Data-parallel engines, the sources of traffic."""
    tp: int = 1
    """Devices of each engine, for tensor parallelism."""
    nodes: int = 1
    """Nodes that the ranks are spread over, evenly and in order."""

    @property
    def ranks(self) -> int:
        """Number of expert-parallel ranks R; rank ``r`` belongs to source ``r // tp``."""
        return self.dp * self.tp

    @property
    def ranks_per_node(self) -> int:
        """Ranks on each node; rank ``r`` is on node ``r // ranks_per_node``."""
        return self.ranks // self.nodes


@dataclass(frozen=True)
class EngineConfig:
    """Limits of one DP engine. All engines have the same limits."""

    max_model_len: int = 4096
    """Most tokens of one sequence, prompt and output together."""
    page_size: int = 16
    """Tokens per KV page."""
    num_pages: int = 1024
    """KV pages per engine. On GPUs, `gimbal serve` computes the number from the free memory."""
    max_rows: int = 32
    """Most sequences that run at the same time."""
    token_budget: int = 512
    """Most tokens in one step, decode and prefill together (T_ref of dispatch)."""
    tile: int = 32
    """Tokens per prefill tile. All tokens of a tile are of one sequence."""
    max_queue: int = 256
    """Most waiting requests; the engine rejects further ones."""
    exchange: Exchange = "gather"
    """Exchange of tokens between ranks: ``gather`` sends all to all ranks, ``sparse`` only to their experts' ranks."""
    prefix_cache: bool = True
    """Whether sequences share the KV pages of common prefixes. The paper has no prefix cache."""

    @property
    def pages_per_row(self) -> int:
        """KV pages of a sequence of ``max_model_len`` tokens."""
        return -(-self.max_model_len // self.page_size)


GPU_ENGINE = EngineConfig(page_size=64, max_rows=128, token_budget=8192, tile=64)
"""Defaults on GPUs, with 8,192 tokens per step as in the paper. ``EngineConfig()`` has the defaults on CPUs."""


@dataclass(frozen=True)
class DispatchConfig:
    """Which engine gets a request (paper 4.2 and 4.3)."""

    policy: DispatchPolicy = "gimbal"
    """Rule that chooses the engine (see docs/scheduling.md)."""
    trace_period_s: float = 0.1
    """Seconds between two traces of an engine."""
    trace_max_age_s: float = 1.0
    """Age in seconds above which a trace counts as missing."""
    high_kv: float = 0.90
    """Share of KV pages in use above which an engine is nearly full."""
    kv_gap: float = 0.10
    """Difference of KV use between engines above which KV use alone decides, if an engine is nearly full."""
    lambda_kv: float = 1.0
    """Weight of KV use in the score, as a multiple of the token budget."""
    lambda_moe: float = 1.0
    """Weight of excess expert pressure in the score, as a multiple of the token budget; 0 ignores it."""
    expert_pressure: PressureForm = "sum"
    """Pressure of an engine: the load of all its ranks (``sum``), or of its fullest rank in each layer (``max``)."""
    close_scores: float = 0.37
    """Share of the token budget within which scores count as equal (3,000 of 8,192 tokens in the paper)."""


@dataclass(frozen=True)
class QueueConfig:
    """Which request an engine runs first (paper 4.4)."""

    policy: QueuePolicy = "sjf_aging"
    """Order of the queue (see docs/scheduling.md)."""
    aging_s: float = 5.0
    """Seconds after which a request runs before all younger ones (``sjf_aging``), or those of its ``priority``."""


@dataclass(frozen=True)
class PlacementConfig:
    """Which rank holds each expert (paper 5), and how fast experts move.

    ``alpha``, ``beta`` and ``gamma`` weigh communication, load and moves (see ``Objective``). The paper's weights
    (1, 0.0025, 1) are for another normalisation; here they leave the load nearly as uneven as before. By the paper's
    criterion (section 6), ``python -m research.calibrate_placement`` finds (1, 0.2, 0.1). The default weighs load more,
    because the locality that one window shows is partly chance. Under the default, later windows are more even, and
    within a node only even loads save time (tests/scheduler/test_unseen_windows.py).
    """

    policy: PlacementPolicy = "gimbal"
    """Policy that proposes placements (see docs/scheduling.md)."""
    alpha: float = 1.0
    """Weight of communication in the objective."""
    beta: float = 1.0
    """Weight of uneven load in the objective."""
    gamma: float = 0.1
    """Weight of moves in the objective."""
    far_distance: float = 9.0
    """Distance of a rank on another node, as a multiple of that of another source's rank on the same node.

    The default is the bandwidth of an H100's NVLink, 450 GB/s, over that of a 400 Gb/s network card."""
    load_term: LoadTerm = "square"
    """Measure of uneven rank loads: the mean square of their deviations, or the fullest rank (``max``)."""
    min_gain: float = 0.02
    """Share of the objective that a new placement must save to be applied.

    The noise of a short window suggests gains of a few percent. A lower value makes experts follow that noise."""
    window_steps: int = 200
    """Steps of traffic before each decision."""
    smoothing: float = 0.5
    """Weight, at least 0 and below 1, that earlier traffic keeps from one window to the next in a decision (ours).

    0 decides by the last window alone. Its noise then moves more than twice as many experts without better balance
    (tests/scheduler/test_unseen_windows.py)."""
    rows_per_pair: int = 2
    """Most experts that one migration call moves from one rank to another."""
    migrate_bytes_per_tick: int = 64 * 2**20
    """Most expert bytes moved between two steps; at least one migration call is made."""


@dataclass(frozen=True)
class NetworkConfig:
    """Address of the gRPC server, its access rules, and the limits of one client."""

    host: str = "127.0.0.1"
    """Address that the server listens on."""
    port: int = 50051
    """Port that the server listens on; 0 takes a free one."""
    tls_cert: Path | None = None
    """PEM file with the server's certificate chain, for TLS only; None serves without TLS."""
    tls_key: Path | None = None
    """PEM file with the private key of ``tls_cert``; None without TLS."""
    tls_client_ca: Path | None = None
    """PEM file of the authorities whose clients may connect (mutual TLS); None asks for no client certificate."""
    api_keys: Path | None = None
    """File of bearer tokens; None lets every client call."""
    max_message_mib: int = 16
    """Size limit of a client's message in MiB."""
    max_streams_per_client: int = 256
    """Most concurrent requests of one client."""


@dataclass(frozen=True)
class ServerConfig:
    """Configuration of everything that a server computes and decides."""

    mesh: MeshConfig = MeshConfig()
    """Devices."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    """Limits of each engine."""
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    """Choice of the engine of a request."""
    queue: QueueConfig = field(default_factory=QueueConfig)
    """Order of the requests of an engine."""
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    """Choice of the rank of each expert."""
