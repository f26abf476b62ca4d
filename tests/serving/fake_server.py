"""A core without a model behind the real frontend and gRPC server, and a small checkpoint folder."""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import threading
import time
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from gimbal_jax.client.client import GimbalClient
from gimbal_jax.config import (
    DispatchConfig,
    EngineConfig,
    MeshConfig,
    ModelConfig,
    NetworkConfig,
    QueueConfig,
    ServerConfig,
)
from gimbal_jax.exceptions import NotServing, QueueFull
from gimbal_jax.scheduler.trace import Trace
from gimbal_jax.serving.core.core import EngineCore, TickNews
from gimbal_jax.serving.core.status import State, Status
from gimbal_jax.serving.engine.meters import HistogramRecord, PhaseTimes
from gimbal_jax.serving.engine.pages import CacheEvents, StoredPage
from gimbal_jax.serving.engine.queue import QueueHead
from gimbal_jax.serving.engine.request import FinishReason, Request, TokenDelta, TokenLogprobs
from gimbal_jax.serving.engine.status import EngineStatus, StepStatus
from gimbal_jax.serving.placement.records import PlacementRecord, PlacementStatus, PlacementTotals
from gimbal_jax.serving.rpc.model_files import ModelFiles
from gimbal_jax.serving.rpc.server import serve

MODEL = ModelConfig(
    vocab_size=300,
    hidden_size=8,
    intermediate_size=8,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    num_experts=4,
    experts_per_token=2,
    moe_intermediate_size=8,
    moe_layers=(0, 1),
    eos_token_ids=(299,),
    pad_token_id=298,
)
CONFIG = ServerConfig(
    mesh=MeshConfig(dp=2, tp=2), engine=EngineConfig(max_model_len=64, page_size=4, num_pages=32, max_rows=8)
)
LATE = dataclasses.replace(CONFIG, dispatch=DispatchConfig(policy="late"))
BY_PRIORITY = dataclasses.replace(CONFIG, queue=QueueConfig(policy="priority"))
LIMIT_S = 120.0
"""Time limit of an asynchronous test. It ends a test that hangs, also on a busy machine."""
NO_FILES = ModelFiles(name="fake", folder=Path("/models/fake"), tokenizer=None, archive=b"", sampling_defaults={})

PLACEMENT = PlacementRecord(
    time=1.0,
    step=200,
    policy="gimbal",
    outcome="applied",
    reason="gain 0.2",
    cost_before=1.0,
    cost_after=0.8,
    imbalance_before=1.5,
    imbalance_after=1.1,
    remote_share_before=0.5,
    remote_share_after=0.4,
    far_share_before=0.25,
    far_share_after=0.125,
    experts_moved=3,
    seconds=0.01,
)


def trace(engine, *, at=None, seen=0, running=0, waiting=0, prefill=0, kv_use=0.25):
    return Trace(
        engine=engine,
        time=time.monotonic() if at is None else at,
        seen=seen,
        running_prefill_tokens=0,
        waiting_prefill_tokens=prefill,
        kv_use=kv_use,
        expert_pressure=1.0 + engine,
        running_requests=running,
        waiting_requests=waiting,
        kv_tokens=10 * running,
        waiting_tokens=prefill,
    )


class FakeCore(EngineCore):
    """An engine core without engines: each token is the one before plus one, the first follows the prompt's last.

    ``step`` emits one token for every request; a thread does so all the time unless ``paused``.
    """

    # Properties of the base class.
    state: State = "serving"
    error = ""
    traces: tuple[Trace, ...] = ()
    central_queue = 0

    def __init__(self, *, model=MODEL, config=CONFIG, state: State = "serving", paused=False, max_queue=100) -> None:
        self.model, self.config, self.state = model, config, state
        self._subscribers = ()
        self.held_S: list[dict[bytes, StoredPage]] = [{} for _ in range(config.mesh.dp)]
        """The pages that the prefix caches hold, by hash."""
        self.flushes = 0
        self.submitted: list[Request] = []
        self.cancelled: list[int] = []
        self.rebalances = 0
        self.paused, self.max_queue = paused, max_queue
        self.last_rebalance: float | None = None
        self._live: dict[int, tuple[Request, list[int]]] = {}
        self._lock = threading.Lock()
        self._stopped = threading.Event()
        self._stepping = threading.Thread(target=self._step_often)

    def __enter__(self):
        self._stepping.start()
        return self

    def __exit__(self, *exc_info):
        self._stopped.set()
        self._stepping.join()

    def notify(self, now=0.0, **news):
        """Call the subscribers with ``bound``, ``pages`` or ``outputs``."""
        for listener in self._subscribers:
            listener(TickNews(now, **news))

    def submit(self, request):
        with self._lock:
            if self.state != "serving":
                raise NotServing(f"the server is {self.state}")
            if len(self._live) >= self.max_queue:
                raise QueueFull(f"engine {request.engine} has {self.max_queue} waiting requests")
            self.submitted.append(request)
            self._live[request.id] = (request, [])

    def cancel(self, request_id):
        with self._lock:
            self.cancelled.append(request_id)
            self._live.pop(request_id, None)

    @property
    def live(self):
        with self._lock:
            return list(self._live)

    def rebalance(self):
        self.rebalances += 1

    def change_pages(self, *news):
        """Change the prefix caches, and notify."""
        for one in news:
            for removed in one.removed:
                del self.held_S[one.engine][removed]
            self.held_S[one.engine].update((page.hash, page) for page in one.stored)
        self.notify(pages=news)

    def flush_cache(self):
        self.flushes += 1
        news = [CacheEvents(engine, (), tuple(held)) for engine, held in enumerate(self.held_S) if held]
        if news:
            self.change_pages(*news)

    def status(self):
        counts_LSE = np.arange(2 * 2 * 4, dtype=np.int64).reshape(2, 2, 4)
        return Status(
            state=self.state,
            error="",
            traces=self.traces,
            engines=(
                EngineStatus(
                    tokens_computed=11,
                    prefill_tokens=5,
                    preemptions=1,
                    free_pages=30,
                    cached_pages=9,
                    prefix_queries=100,
                    prefix_hits=40,
                    queue_head=None,
                ),
                EngineStatus(
                    tokens_computed=12,
                    prefill_tokens=6,
                    preemptions=0,
                    free_pages=31,
                    cached_pages=3,
                    prefix_queries=200,
                    prefix_hits=0,
                    queue_head=QueueHead("a", 1.5, 40),
                ),
            ),
            steps=StepStatus(
                count=7,
                compiles_after_warmup=0,
                seconds=HistogramRecord((0.01, 0.1), (4, 2, 1), 0.5),
                tokens=HistogramRecord((8, 64), (5, 2, 0), 23.0),
                phases=(PhaseTimes("schedule", 0.0002, 0.0001, 0.0009), PhaseTimes("wait", 0.02, 0.01, 0.05)),
            ),
            placement=PlacementStatus(
                slot_of_expert_LE=np.array([[0, 1, 2, 3], [3, 2, 1, 0]], np.int32),
                window_counts_LSE=counts_LSE,
                total_counts_LSE=counts_LSE * 10,
                records=(PLACEMENT,),
                totals=PlacementTotals(
                    applied=1,
                    predicted_gain=0.2,
                    experts_moved=3,
                    bytes_moved=4096,
                    last_rebalance=self.last_rebalance,
                ),
                windows_written=5,
                windows_lost=2,
            ),
        )

    def step(self):
        with self._lock:
            outputs = [self._next(*item) for item in self._live.values()]
            self._live = {id: item for id, item in self._live.items() if id not in _ended(outputs)}
        if outputs:
            self.notify(outputs=outputs)

    def fail(self, request_id, error):
        with self._lock:
            del self._live[request_id]
        self.notify(outputs=[TokenDelta(request_id, (), finish_reason="error", error=error)])

    def _next(self, request, tokens) -> TokenDelta:
        token = ([*request.prompt, *tokens][-1] + 1) % self.model.vocab_size
        if token in request.sampling.stop_token_ids:
            return TokenDelta(request.id, (), finish_reason="stop", stop=token)
        tokens.append(token)
        reason: FinishReason | None = "length" if len(tokens) == request.sampling.max_tokens else None
        top = tuple(range(20)), tuple(-float(rank) for rank in range(20))
        logprobs = (TokenLogprobs(-0.5, *top),) if request.sampling.logprobs is not None else ()
        output = TokenDelta(request.id, (token,), logprobs, reason)
        if len(tokens) == 1:
            output.started = request.arrival + 0.25
            if request.engine is not None:
                size, held = self.config.engine.page_size, self.held_S[request.engine]
                known = itertools.takewhile(held.__contains__, request.page_hashes)
                output.cached_tokens = min(len(list(known)), (len(request.prompt) - 1) // size) * size
            if request.sampling.prompt_logprobs is not None:
                output.prompt_logprobs = tuple(TokenLogprobs(-float(i), *top) for i in range(1, len(request.prompt)))
        return output

    def _step_often(self):
        while not self._stopped.wait(0.001):
            if not self.paused:
                self.step()


def _ended(outputs):
    return {output.request_id for output in outputs if output.finish_reason}


@contextlib.asynccontextmanager
async def running_server(core, files=NO_FILES, network=NetworkConfig(port=0), **options):  # noqa: B008 frozen
    """A client of a server on a free port, the port, the stop event and the serving task."""
    stop = asyncio.Event()
    started = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(core, files, network, stop, started=started.set_result, **options))
    await asyncio.wait({task, started}, return_when=asyncio.FIRST_COMPLETED)
    if task.done():
        await task
    try:
        async with GimbalClient(f"127.0.0.1:{started.result()}") as client:
            yield client, started.result(), stop, task
    finally:
        stop.set()
        await task


def with_server(core_options=None, **options):
    """Runs an async test(core, client) against a server of its own, with a time limit."""

    def decorate(test):
        @functools.wraps(test)
        def run():
            async def main():
                async with asyncio.timeout(LIMIT_S), running_server(core, **options) as (client, *_):
                    await test(core, client)

            with FakeCore(**(core_options or {})) as core:
                asyncio.run(main())

        del run.__wrapped__  # pytest would take the test's parameters for fixtures
        return run

    return decorate


async def until(condition):
    """Waits until the condition holds; the test's own time limit ends it otherwise."""
    while not condition():
        await asyncio.sleep(0.005)


def write_model_folder(folder, *, chat_template=None):
    """A byte-level tokenizer over 256 bytes plus two special tokens, with a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={char: id for id, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|start|>", "<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = chat_template or (
        "{% for message in messages %}\n"
        "<|start|>{{ message.role }}: {{ message.content }}<|end|>\n"
        "{% endfor %}\n"
        "{% if add_generation_prompt %}<|start|>assistant:{% endif %}"
    )
    config = {"eos_token": {"content": "<|end|>", "special": True}, "bos_token": None, "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_moe"}))
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_k": 20, "do_sample": True}))
    return folder
