"""scripts/sticky_topics.py on the tiny model: what it prints is what was routed."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from gimbal_jax.serving.engine.request import Request, SamplingParams
from scripts import sticky_topics
from scripts.sticky_topics import POLICIES, Window, run_case, table, topic_requests
from tests.e2e.rig import CONFIG, MODEL, SOURCES

PER_ENGINE = 60


def sticky_window(rng) -> list[Request]:
    """Each engine's prompts are of its own few tokens."""
    requests = []
    for i in range(PER_ENGINE * SOURCES):
        prompt = tuple((i % SOURCES * 20 + rng.integers(20, size=24)).tolist())
        sampling = SamplingParams(2, temperature=0.0)
        requests.append(Request(f"{i}", prompt, sampling, 0.0, i % SOURCES, i // SOURCES + 1))
    return requests


@pytest.fixture(scope="module")
def windows():
    rng = np.random.default_rng(6)
    return [sticky_window(rng) for _ in range(2)]


def with_policy(policy):
    return replace(CONFIG, placement=replace(CONFIG.placement, policy=policy, window_steps=10**9))


@pytest.fixture(scope="module")
def cases(runner, windows):
    found = {}
    for policy in POLICIES:
        ended: list[int] = []
        found[policy] = run_case(runner, MODEL, with_policy(policy), windows, ended.append)
        assert sum(ended) == 2 * PER_ENGINE * SOURCES
    return found


def test_all_policies_start_alike(cases):
    assert len({case.before for case in cases.values()}) == 1


def test_static_moves_nothing(runner, windows, cases):
    static = cases["static"]
    assert (static.decision.outcome, static.decision.experts_moved) == ("kept", 0)
    swapped = run_case(runner, MODEL, with_policy("static"), windows[::-1])
    assert (swapped.before, swapped.after) == (static.after, static.before)


@pytest.mark.parametrize("policy", ["gimbal", "eplb"])
def test_the_second_window_is_measured_not_predicted(cases, policy):
    case = cases[policy]
    assert case.decision.outcome == "applied"
    # Fresh prompts: near what the decision expected of the first window, and not equal to it.
    assert case.after.imbalance == pytest.approx(case.decision.imbalance_after, abs=0.1)
    assert case.after.imbalance != case.decision.imbalance_after
    assert case.before == Window(case.decision.imbalance_before, case.decision.remote_share_before)
    assert case.after.imbalance < cases["static"].after.imbalance


def test_gimbal_keeps_more_tokens_at_home(cases):
    assert cases["gimbal"].after.remote_share < cases["eplb"].after.remote_share
    assert cases["gimbal"].after.remote_share < cases["static"].after.remote_share


class Words:
    """Stands for the tokenizer: a word is a token."""

    def encode(self, text: str) -> list:
        return text.split()


def test_topics_stick_to_their_engines():
    def shared_words(sticky: bool) -> set:
        requests = topic_requests(Words(), sticky, 40, np.random.default_rng(0))
        first, second = ({word for r in requests if r.engine == engine for word in r.prompt} for engine in (0, 1))
        return first & second

    assert shared_words(sticky=True) == set()
    assert len(shared_words(sticky=False)) > 100


def test_table_shows_every_case_in_80_columns(cases):
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table({("sticky", policy): case for policy, case in cases.items()}))
    for policy, case in cases.items():
        assert policy in shown.get()
        assert f"{case.before.imbalance:.3f} -> {case.after.imbalance:.3f}" in shown.get()
        assert f"{case.before.remote_share:.1%} -> {case.after.remote_share:.1%}" in shown.get()


def test_help():
    command = [sys.executable, sticky_topics.__file__, "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "--compile-cache" in shown
