"""Bytes over links, against naive loops, and the forms of the exchange."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gimbal_jax.simulation.kernel_table import Prices
from gimbal_jax.simulation.links import Links, link_curves

HIDDEN_BYTES, CHOICES, EXPERTS = 4096, 8, 128


def links(ranks=4, tp=2, nodes=1) -> Links:
    return Links(Prices(link_curves()), ranks, tp, nodes, network_bandwidth=50e9, network_latency_s=1e-5)


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.sampled_from([(4, 2, 1), (4, 2, 2), (8, 2, 2), (8, 1, 4), (8, 2, 1)]))
def test_the_busiest_rank_agrees_with_a_naive_count(seed, shape):
    ranks, tp, nodes = shape
    copies_SR = np.random.default_rng(seed).integers(0, 50, (ranks // tp, ranks)).astype(float)
    sent, got = np.zeros((2, ranks)), np.zeros((2, ranks))
    for sender in range(ranks):
        for receiver in range(ranks):
            far = int(sender * nodes // ranks != receiver * nodes // ranks)
            if sender != receiver:
                rows = copies_SR[sender // tp, receiver] / tp
                sent[far, sender] += rows
                got[far, receiver] += rows
    near_L, far_L = links(ranks, tp, nodes).busiest_rows_L(copies_SR[None])
    assert [near_L[0], far_L[0]] == pytest.approx(np.maximum(sent, got).max(axis=1).tolist())


def test_sparse_gets_cheaper_with_locality_and_gather_does_not():
    home, away = np.zeros((1, 2, 4)), np.zeros((1, 2, 4))
    home[0, 0, :2] = home[0, 1, 2:] = away[0, 0, 2:] = away[0, 1, :2] = 4000
    net = links()
    near = net.sparse_seconds_L(home, HIDDEN_BYTES, CHOICES, EXPERTS)
    far = net.sparse_seconds_L(away, HIDDEN_BYTES, CHOICES, EXPERTS)
    assert near[0] < 0.7 * far[0]
    assert net.gather_seconds(8000, HIDDEN_BYTES, CHOICES, EXPERTS) > far[0] / 2


def test_all_gather_of_a_measured_buffer_takes_the_measured_time():
    elements = 4194304  # 45.33 and 45.xx us for 4 GPUs
    seconds = links().among_all("nccl_all_gather", np.array(2.0 * elements))
    assert seconds == pytest.approx(45.3e-6, rel=0.01)


def test_bytes_across_nodes_take_a_network_card_s_time():
    net, one = links(ranks=8, nodes=2), links(ranks=8)
    rows = np.full((1, 4, 8), 500.0)  # of each source's: half cross, over two cards, there and back
    sparse = net.sparse_seconds_L(rows, HIDDEN_BYTES, CHOICES, EXPERTS)[0]
    assert sparse > one.sparse_seconds_L(rows, HIDDEN_BYTES, CHOICES, EXPERTS)[0]
    assert sparse > 2 * (1000 * HIDDEN_BYTES / 50e9 + 1e-5)
    for buffer in np.array([8.0, 4000.0, 400_000.0]) * HIDDEN_BYTES:  # of which four cards bring half
        near = links(ranks=4).among_all("nccl_all_gather", buffer)
        assert net.among_all("nccl_all_gather", buffer) == pytest.approx(max(near, buffer / 2 / 4 / 50e9) + 1e-5)


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.sampled_from([(4, 2, 2), (8, 2, 2), (8, 1, 4), (8, 2, 1), (16, 4, 2)]))
def test_far_bytes_agree_with_a_naive_count(seed, shape):
    ranks, tp, nodes = shape
    copies_LSR = np.random.default_rng(seed).integers(0, 50, (3, ranks // tp, ranks)).astype(float)
    rows = sum(
        copies_LSR[layer, source, rank]
        for layer in range(3)
        for source in range(ranks // tp)
        for rank in range(ranks)
        if source * tp * nodes // ranks != rank * nodes // ranks
    )
    found = links(ranks, tp, nodes).sparse_far_bytes(copies_LSR, HIDDEN_BYTES, CHOICES)
    assert found == rows * (2 * HIDDEN_BYTES + 2 * 4 * CHOICES), "there with places and weights, and back"


def test_gather_sends_each_token_to_every_other_node_once():
    one, two, four = (links(ranks=8, nodes=nodes) for nodes in (1, 2, 4))
    found = [net.gather_far_bytes(100, HIDDEN_BYTES, CHOICES, EXPERTS) for net in (one, two, four)]
    assert found == [0.0, found[1], 3 * found[1]]
    assert found[1] == 100 * (2 * HIDDEN_BYTES + 4 * 3 * CHOICES) + 4 * 8 * EXPERTS
    assert two.gather_far_bytes(0, HIDDEN_BYTES, CHOICES, EXPERTS) == 0.0


def test_more_gpus_than_measured_are_counted():
    net = links(ranks=8)
    net.gather_seconds(100, HIDDEN_BYTES, CHOICES, EXPERTS)
    assert net.prices.outside["nccl_all_gather on 8 GPUs"] == 2
    assert net.prices.outside["nccl_reduce_scatter on 8 GPUs"] == 1


def test_moving_within_a_rank_takes_no_link():
    src, dst = np.array([0, 0, 1]), np.array([1, 1, 2])
    net = links()
    assert net.move_seconds(src, src, 10**7) == 0.0
    twice = net.move_seconds(src, dst, 2 * 10**7)
    assert twice > net.move_seconds(src, dst, 10**7) > 2 * 10**7 / 450e9, (
        "two rows leave rank 0, at NVLink's rate at most"
    )
