"""What the first rebalance does to balance and locality, with and without topics that stick to an engine.

Runs the demo model in this process on a 2 x 2 mesh of virtual CPU devices, through the server that ``gimbal serve``
runs too, but ticked here, so that the routing is the same each time. Each case starts from the contiguous placement,
serves one window of requests, decides and migrates, and serves a second window of fresh prompts. Balance and remote
share are of what the model routed in these windows, never predicted. ``static`` moves nothing: its second window shows
what would have been without a rebalance.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Protocol

import jax
import numpy as np
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from gimbal_jax.config import EngineConfig, MeshConfig, ModelConfig, PlacementConfig, PlacementPolicy, ServerConfig
from gimbal_jax.model.demo_model import TOPICS, topic_prompt, write_demo_model
from gimbal_jax.model.hf_config import load_config
from gimbal_jax.model.loading import load_weights
from gimbal_jax.model.sharding import make_mesh
from gimbal_jax.scheduler.migration import plan_rounds
from gimbal_jax.scheduler.placement import static_placement
from gimbal_jax.scheduler.traffic import imbalance_L, remote_share
from gimbal_jax.serving.core.core import Server
from gimbal_jax.serving.core.status import PlacementRecord
from gimbal_jax.serving.engine.request import Output, Request, SamplingParams
from gimbal_jax.serving.engine.runner import Runner
from gimbal_jax.serving.runtime.device_runner import DeviceRunner
from gimbal_jax.serving.text.tokenizer import load_tokenizer

OUT = Path(__file__).resolve().parents[1] / "out"
CONFIG = ServerConfig(
    MeshConfig(dp=2, tp=2),
    EngineConfig(max_model_len=128, num_pages=128, max_rows=8, token_budget=128, max_queue=10_000),
    # The window is closed by asking.
    placement=PlacementConfig(window_steps=10**9),
)
ENGINES = CONFIG.mesh.dp
POLICIES: tuple[PlacementPolicy, ...] = ("gimbal", "eplb", "static")
TOPICS_STICK = {"sticky": True, "mixed": False}
PROMPT_WORDS, OUTPUT_TOKENS = 48, 16

console = Console()


class Encoder(Protocol):
    """The part of a tokenizer that is needed here."""

    def encode(self, text: str) -> list[int]: ...


@dataclass(frozen=True)
class Window:
    """What one window's traffic did under the placement that served it."""

    imbalance: float
    """Fullest rank over mean rank, mean over layers."""
    remote_share: float
    """Share of expert tokens that left their source's ranks."""


@dataclass(frozen=True)
class Case:
    before: Window
    after: Window
    decision: PlacementRecord
    migration_s: float
    """From the request for a decision to the end of the migration, less the decision itself."""


def main(
    requests: Annotated[int, typer.Option(min=1, help="Requests per engine and window.")] = 64,
    seed: Annotated[int, typer.Option(help="Of prompts and of sampled tokens.")] = 0,
    model: Annotated[Path, typer.Option(help="The demo model; written here if it is missing.")] = OUT / "demo-model",
    compile_cache: Annotated[Path, typer.Option(help="Folder that keeps compiled programs.")] = OUT / "compile-cache",
) -> None:
    """Balance and remote share before and after the first rebalance, by policy, with and without sticky topics."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", CONFIG.mesh.ranks)
    jax.config.update("jax_compilation_cache_dir", str(compile_cache))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    if not (model / "config.json").exists():
        with console.status("writing the demo model"):
            write_demo_model(model)
    tokenizer = load_tokenizer(model)
    assert tokenizer is not None, f"{model} has no tokenizer"
    architecture = load_config(model)
    with Progress(console=console) as progress:
        compiling = progress.add_task("compiling", total=None)
        runner = new_runner(model, architecture, lambda done, of: progress.update(compiling, completed=done, total=of))
        cases = {}
        for topics, sticky in TOPICS_STICK.items():
            rng = np.random.default_rng(seed)
            windows = [topic_requests(tokenizer, sticky, requests, rng) for _ in range(2)]
            for policy in POLICIES:
                bar = progress.add_task(f"{topics} topics, {policy}", total=2 * requests * ENGINES)
                advance = partial(progress.advance, bar)
                cases[topics, policy] = run_case(runner, architecture, with_policy(policy), windows, advance)
    console.print(table(cases))
    size = f"{PROMPT_WORDS} + {OUTPUT_TOKENS} tokens"
    experts = len(architecture.moe_layers) * architecture.num_experts
    console.print(f"{requests} requests of {size} per engine and window, {experts} experts in all layers, seed {seed}")


def new_runner(folder: Path, model: ModelConfig, progress: Callable[[int, int], None]) -> DeviceRunner:
    mesh = make_mesh(CONFIG.mesh)
    weights, slot_of_expert_LE = load_weights(folder, model, mesh, "float32")
    runner = DeviceRunner(model, CONFIG, mesh, weights, slot_of_expert_LE, "float32")
    runner.warm_up(progress)
    return runner


def with_policy(policy: PlacementPolicy) -> ServerConfig:
    return replace(CONFIG, placement=replace(CONFIG.placement, policy=policy))


def topic_requests(tokenizer: Encoder, sticky: bool, per_engine: int, rng: np.random.Generator) -> list[Request]:
    """Requests for each engine in turn, on the engine's own share of the topics if ``sticky``, else on any."""
    share = len(TOPICS) // ENGINES
    requests = []
    for i in range(per_engine * ENGINES):
        engine, sequence = i % ENGINES, i // ENGINES + 1
        topics = TOPICS[engine * share : (engine + 1) * share] if sticky else TOPICS
        prompt = tokenizer.encode(topic_prompt(str(rng.choice(topics)), PROMPT_WORDS, rng))[:PROMPT_WORDS]
        sampling = SamplingParams(OUTPUT_TOKENS, seed=int(rng.integers(2**32)))
        requests.append(Request(f"{i}", tuple(prompt), sampling, 0.0, engine, sequence))
    return requests


def run_case(
    runner: Runner,
    model: ModelConfig,
    config: ServerConfig,
    windows: Sequence[Sequence[Request]],
    advance: Callable[[int], None] = lambda requests: None,
) -> Case:
    """Serve the first window, rebalance, serve the second; ``advance`` is told of requests that ended."""
    place_contiguously(runner, config)
    runner.begin_counts()()
    server = Server(model, config, runner)

    def count_ended(outputs: list[Output]) -> None:
        advance(sum(output.finish_reason is not None for output in outputs))

    server.on_outputs = count_ended
    server.open()
    try:
        before = serve_window(server, windows[0], config.mesh.ranks)
        decision, migration_s = rebalance(server)
        after = serve_window(server, windows[1], config.mesh.ranks)
    finally:
        server.stop()
    return Case(before, after, decision, migration_s)


def place_contiguously(runner: Runner, config: ServerConfig) -> None:
    layers, experts = runner.slot_of_expert_LE.shape
    wanted_LE = static_placement(layers, experts, config.mesh.ranks)
    for layer, wanted_E in enumerate(wanted_LE):
        old_E = runner.slot_of_expert_LE[layer]
        for moves in plan_rounds(old_E, wanted_E, config.mesh.ranks, config.placement.rows_per_pair):
            runner.migrate(layer, moves)


def serve_window(server: Server, requests: Sequence[Request], ranks: int) -> Window:
    """Serve these requests to their end, all of them waiting from the start."""
    start = server.status()
    for request in requests:
        server.submit(request)
    server.tick(0.0)
    while not all(engine.idle for engine in server.engines):
        server.tick(0.0)
    end = server.status()
    assert np.array_equal(start.slot_of_expert_LE, end.slot_of_expert_LE), "a migration ran during the window"
    counts_LSE = end.total_counts_LSE - start.total_counts_LSE
    return Window(
        float(imbalance_L(counts_LSE, end.slot_of_expert_LE, ranks).mean()),
        remote_share(counts_LSE, end.slot_of_expert_LE, ranks),
    )


def rebalance(server: Server) -> tuple[PlacementRecord, float]:
    """Decide on the window so far and migrate; returns the decision and the seconds that all but it took."""
    began = time.perf_counter()
    server.rebalance()
    while not (records := server.status().placements) or records[-1].outcome == "migrating":
        server.tick(0.0)
        time.sleep(0.001)  # the placement thread decides meanwhile
    return records[-1], time.perf_counter() - began - records[-1].seconds


def table(cases: dict[tuple[str, PlacementPolicy], Case]) -> Table:
    result = Table(title="Before -> after the first rebalance")
    for name in ("topics", "policy"):
        result.add_column(name)
    for name in ("imbalance", "remote share", "experts\nmoved", "decide + move\n(ms)"):
        result.add_column(name, justify="right", no_wrap=True)
    for (topics, policy), case in cases.items():
        result.add_row(
            topics,
            policy,
            f"{case.before.imbalance:.3f} -> {case.after.imbalance:.3f}",
            f"{case.before.remote_share:.1%} -> {case.after.remote_share:.1%}",
            f"{case.decision.experts_moved}",
            f"{case.decision.seconds * 1e3:.1f} + {case.migration_s * 1e3:.1f}",
            end_section=policy == POLICIES[-1],
        )
    return result


if __name__ == "__main__":
    typer.run(main)
