"""Options of one request, over real gRPC against the tiny model with a tokenizer of bytes."""

import asyncio
import contextlib
import re

import pytest

from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.rpc.model_files import load_model_files
from tests.e2e.rig import CONFIG, MODEL, SOURCES
from tests.serving.fake_server import LIMIT_S, running_server, until, write_model_folder

PROMPT = "one,two,three"  # of bytes that are in the small vocabulary


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return load_model_files(write_model_folder(tmp_path_factory.mktemp("model")))


@contextlib.asynccontextmanager
async def serving(runner, files):
    """The server and a client of it; at the end no page is taken."""
    runner.begin_counts()()
    server = EngineCore(MODEL, CONFIG, runner)
    server.start()
    try:
        async with asyncio.timeout(LIMIT_S), running_server(server, files) as (client, port, *_):
            await until(lambda: server.state == "serving")
            yield server, client, port
            await until(lambda: free_pages(server) == CONFIG.engine.num_pages * SOURCES)
    finally:
        server.stop()


def free_pages(server):
    return sum(engine.free_pages for engine in server.engines)


async def collect(client, prompt=PROMPT, **options):
    """Text, tokens and log probabilities of each choice."""
    outputs: dict[int, tuple[str, list[int], list[float]]] = {}
    async for chunk in client.generate(prompt, ignore_eos=True, **{"max_tokens": 24, **options}):
        text, tokens, logprobs = outputs.setdefault(chunk.index, ("", [], []))
        logprobs += [entry.chosen for entry in chunk.logprobs]
        outputs[chunk.index] = (text + chunk.text, [*tokens, *chunk.token_ids], logprobs)
    return [outputs[index] for index in range(len(outputs))]


def test_choices_have_own_seeds_and_stops_cut_the_text(runner, files):
    async def main():
        async with serving(runner, files) as (_, client, _):
            # Each choice is what a request of its own with its seed gives.
            choices = await collect(client, seed=5, n=3)
            assert choices == [(await collect(client, seed=5 + index))[0] for index in range(3)]
            assert len({text for text, *_ in choices}) == 3

            # A stop string cuts the text where it first stands, and the tokens after the one that completes it.
            text, tokens, _ = choices[0]
            stop = re.findall(r"[!-~]{2}", text)[-1]
            [(cut, cut_tokens, _)] = await collect(client, seed=5, stop=[stop])
            assert cut == text[: text.index(stop)]
            assert cut_tokens == tokens[: len(cut_tokens)]
            assert stop in files.tokenizer.decode(cut_tokens) and stop not in files.tokenizer.decode(cut_tokens[:-1])

    asyncio.run(main())


def test_prompt_logprobs_are_those_of_the_same_tokens_as_output(runner, files):
    async def main():
        async with serving(runner, files) as (_, client, _):
            prompt = files.tokenizer.encode(PROMPT)
            [(_, tokens, logprobs)] = await collect(client, temperature=0, logprobs=0)
            chunks = client.generate(token_ids=prompt + tokens, max_tokens=1, prompt_logprobs=1)
            first = await anext(chunks)
            await chunks.aclose()
            assert len(first.prompt_logprobs) == len(prompt) + len(tokens) - 1
            again = first.prompt_logprobs[-len(tokens) :]
            assert [entry.chosen for entry in again] == pytest.approx(logprobs, abs=1e-3)
            assert [entry.top_ids[0] for entry in again] == tokens  # greedy

    asyncio.run(main())
