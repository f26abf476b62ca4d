"""The networks of links.toml, and how users name them."""

import pytest

from gimbal_jax.planning.gpus import gpu_kinds
from gimbal_jax.planning.links import Link, link_kinds, parse_link

KINDS = link_kinds()


@pytest.mark.parametrize("link", KINDS.values(), ids=KINDS)
def test_rates_are_what_names_say(link: Link):
    gigabits = int(link.name.lstrip("ibroceth"))
    assert link.bandwidth == gigabits * 1e9 / 8
    assert f"{gigabits} Gb/s per GPU" in link.description


@pytest.mark.parametrize("link", KINDS.values(), ids=KINDS)
def test_facts_are_plausible(link: Link):
    # A wrong unit is off by at least eight; no card is as fast as NVLink.
    assert 12e9 < link.bandwidth < min(gpu_kinds()[name].link_bandwidth for name in ("H100", "A100-80"))
    assert 0.5e-6 <= link.latency_s < 2e-6


def test_a_name_in_any_case_and_none_in_a_node():
    assert parse_link("IB400", 2) == KINDS["ib400"]
    assert parse_link(None, 1) is None


@pytest.mark.parametrize(
    ("text", "nodes", "message"),
    [
        (None, 2, "--link: 2 nodes need a network between them, one of ib400, ib200, roce400, roce200, eth100"),
        ("ib800", 2, "--link ib800: must be one of ib400, ib200, roce400, roce200, eth100"),
        ("ib400", 1, "--link ib400: --gpus is one node, which needs no network"),
    ],
)
def test_what_does_not_belong_is_refused(text, nodes, message):
    with pytest.raises(ValueError) as refused:
        parse_link(text, nodes)
    assert str(refused.value).startswith(message)
