"""``gimbal place``: policies side by side on a counts file."""

from dataclasses import replace
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
from typer.testing import CliRunner, Result

from gimbal_jax.cli.main import app
from gimbal_jax.cli.place import ALL_POLICIES
from gimbal_jax.config import MeshConfig, PlacementConfig
from gimbal_jax.planning.placements import (
    Answer,
    agreement,
    load_windows,
    one_window,
    policy_answer,
    spaced_layers,
    tables,
)
from gimbal_jax.scheduler.baselines.sem_moe import sem_moe_plan
from gimbal_jax.scheduler.counts_file import CountsFile, load_counts, load_placement, save_counts
from gimbal_jax.scheduler.distance import distance_SR
from gimbal_jax.scheduler.objective import window_objective
from gimbal_jax.scheduler.placement import propose, static_placement
from gimbal_jax.scheduler.traffic import far_share, imbalance_L, rank_of_expert, remote_share
from gimbal_jax.scheduler.windows import WindowConfig, synthetic_windows

LAYERS, EXPERTS, RANKS = 4, 32, 4
MESH = MeshConfig(dp=2, tp=2)


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A file of two windows, with what the offline policies need."""
    config = WindowConfig(layers=LAYERS, experts=EXPERTS, experts_per_token=4, requests=8, persistence=0.8)
    windows = synthetic_windows(config, np.random.default_rng(0))
    first, second = next(windows), next(windows)
    slot_LE = static_placement(LAYERS, EXPERTS, RANKS)
    path = tmp_path_factory.mktemp("counts") / "counts.npz"
    save_counts(
        path,
        np.stack([first.counts_LSE, second.counts_LSE]),
        np.stack([slot_LE, slot_LE]),
        {"ranks": RANKS},
        transitions_LEE=first.transitions_LEE,
        request_counts_NLE=first.counts_NLE,
    )
    return path


@pytest.fixture
def file(path) -> CountsFile:
    return load_counts(path)


def place(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["place", *map(str, arguments)], env={"COLUMNS": "100", "TERM": "dumb"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_the_command_prints_tables_draws_and_saves(path, file, tmp_path):
    picture, saved = tmp_path / "place.png", tmp_path / "placement.npz"
    names = ["moetuner", "gimbal", "sem_moe", "eplb", "gimbal_refined"]
    options = [part for name in names for part in ("--policy", name)]
    result = place(
        "--counts", path, *options, "--compare", "exact", "--layers", 3, "--picture", picture, "--save", saved
    )
    assert result.exit_code == 0, result.output
    summary, beside = result.stdout.split("Against the exact answer")
    assert "mean of 3 MoE layers" in summary
    rows = [line.split("│")[1].strip() for line in summary.splitlines() if line.startswith("│")]
    assert rows == ["static", *names, "exact"]
    assert "moetuner, worst layers: farthest above exact" in beside
    assert "exact: 3 optimal; gap" in result.stderr
    assert f"wrote {picture}" in result.stderr
    assert matplotlib.image.imread(picture).std() > 0.05
    slot_LE, ranks = load_placement(saved)
    everything = policy_answer("gimbal_refined", file, PlacementConfig())
    assert (rank_of_expert(slot_LE, ranks) == everything.rank_LE).all()


def test_without_exact_the_least_even_layers_are_shown(path, tmp_path):
    result = place("--counts", path, "--window", 1, "--picture", tmp_path / "place.png")
    assert result.exit_code == 0, result.output
    assert "gimbal, worst layers: least even" in result.stdout
    assert "exact" not in result.stdout


@pytest.mark.parametrize("policy", ALL_POLICIES)
def test_every_policy_places_all_experts_and_is_scored_under_one_objective(policy, file):
    answer = policy_answer(policy, file, PlacementConfig())
    assert (np.sort(answer.rank_LE, axis=1) == np.repeat(np.arange(RANKS), EXPERTS // RANKS)).all()
    assert (answer.objective.config.beta, answer.objective.config.gamma) == (
        PlacementConfig.beta,
        PlacementConfig.gamma,
    )
    assert answer.moves_LE.any() == (policy != "static")


def test_figures_are_those_of_the_traffic(file):
    window = one_window(file, 1)
    answer = policy_answer("gimbal_refined", window, PlacementConfig())
    counts_LSE = file.counts_WLSE[1]
    proposal = propose(counts_LSE, file.slot_of_expert_WLE[1], MESH, PlacementConfig("gimbal_refined"))
    assert answer.fullest_L == pytest.approx(imbalance_L(counts_LSE, proposal.slot_of_expert_LE, RANKS))
    assert answer.remote_L.mean() == pytest.approx(remote_share(counts_LSE, proposal.slot_of_expert_LE, RANKS))
    assert answer.cost_L.mean() == pytest.approx(proposal.cost_after)
    assert answer.moves_LE.sum() == proposal.experts_moved


def test_over_several_nodes_distances_decide_and_what_crosses_is_shown(path, file, tmp_path):
    window = one_window(file, 1)
    counts_LSE, mesh = file.counts_WLSE[1], replace(MESH, nodes=2)
    here, over_two = (policy_answer("gimbal_refined", window, PlacementConfig(), nodes) for nodes in (1, 2))
    proposal = propose(counts_LSE, file.slot_of_expert_WLE[1], mesh, PlacementConfig("gimbal_refined"))
    assert over_two.cost_L.mean() == pytest.approx(proposal.cost_after)
    assert over_two.far_L.mean() == pytest.approx(far_share(counts_LSE, proposal.slot_of_expert_LE, mesh))
    assert not here.far_L.any()
    plain, result = (place("--counts", path, "--picture", tmp_path / "p.png", *more) for more in ((), ("--nodes", 2)))
    assert "far" not in plain.stdout and result.exit_code == 0
    (title,) = (line for line in result.stdout.splitlines() if "fullest" in line and "moved" in line)
    cells = [line.split("│") for line in result.stdout.splitlines() if "gimbal_refined" in line]
    shown = [name.strip() for name in title.split("┃")].index("far")
    everything = policy_answer("gimbal_refined", file, PlacementConfig(), 2)
    assert cells[0][shown].strip() == f"{everything.far_L.mean():.1%}"


def test_sem_moe_is_scored_on_the_traffic_of_its_own_dispatch(file):
    answer = policy_answer("sem_moe", file, PlacementConfig())
    assert file.request_counts_NLE is not None
    plan = sem_moe_plan(file.request_counts_NLE, 2, RANKS, np.random.default_rng(0))
    assert answer.remote_L.mean() == pytest.approx(1 - plan.local_share)


def test_agreement_by_hand():
    # Each expert serves one source: 0 and 3 are local to source 0's rank 0 only, 1 and 2 to source 1's.
    counts_LSE = np.array([[[4, 0, 0, 4], [0, 4, 4, 0]]])
    config = PlacementConfig(alpha=1.0, beta=1.0, gamma=0.4)
    mesh = MeshConfig(2, 1)
    objective = window_objective(counts_LSE, static_placement(1, 4, 2), distance_SR(mesh, 9.0), config)
    stay = Answer("stay", objective, counts_LSE, mesh, np.array([[0, 1, 2, 3]]), 0.0)
    exact = replace(stay, name="exact", slot_of_expert_LE=np.array([[0, 2, 3, 1]]))
    other = replace(stay, name="other", slot_of_expert_LE=np.array([[2, 3, 0, 1]]))
    assert [float(answer.cost_L[0]) for answer in (stay, exact, other)] == pytest.approx([0.5, 0.2, 0.9])
    found = agreement(stay, exact)
    assert (found.excess, found.worst_excess, found.same, found.same_moves) == pytest.approx((1.5, 1.5, 0.5, 0.0))
    assert agreement(other, exact).same_moves == 1.0  # both moved experts are where exact has them, and two more moved
    assert agreement(other, stay).comm_gap == pytest.approx(0.0)  # 8 of 16 tokens are remote in both
    assert agreement(exact, stay).comm_gap == pytest.approx(-1.0)


def test_windows_of_a_folder_and_of_several_files_are_joined(path, file, tmp_path):
    folder = tmp_path / "dump"
    folder.mkdir()
    for number in (1, 0):
        one = one_window(file, number)
        save_counts(folder / f"window-{number}.npz", one.counts_WLSE, one.slot_of_expert_WLE, one.meta)
    for paths in ([folder], [folder / "window-0.npz", folder / "window-1.npz"]):
        joined = load_windows(paths)
        assert (joined.counts_WLSE == file.counts_WLSE).all()
        assert (joined.slot_of_expert_WLE == file.slot_of_expert_WLE).all()
    assert load_windows([path]).transitions_LEE is not None
    picture = tmp_path / "new" / "place.png"
    both, whole = (place("--counts", counts, "--picture", picture) for counts in (folder, path))
    assert both.exit_code == 0 and picture.exists()
    objectives = [
        [line.split("│")[1:3] for line in result.stdout.splitlines() if line.startswith("│ gimbal")]
        for result in (both, whole)
    ]
    assert objectives[0] == objectives[1] != []


def test_files_of_different_meshes_are_not_joined(path, file, tmp_path):
    (tmp_path / "empty").mkdir()
    other = tmp_path / "other.npz"
    one = one_window(file, 0)
    save_counts(other, one.counts_WLSE[:, :2], one.slot_of_expert_WLE[:, :2], one.meta)
    for counts, message in (
        (other, "2 layers, 2 sources, 32 experts on 4 ranks, but"),
        (tmp_path / "empty", "no .npz"),
    ):
        result = place("--counts", path, "--counts", counts)
        assert result.exit_code == 2 and message in result.stderr


def test_layers_are_spaced_evenly(file):
    assert spaced_layers(file, None).tolist() == [0, 1, 2, 3]
    assert spaced_layers(file, 2).tolist() == [0, 3]
    assert spaced_layers(file, 99).tolist() == [0, 1, 2, 3]


def test_the_layer_farthest_from_exact_comes_first(file):
    config = PlacementConfig()
    answers = [policy_answer(name, file, config) for name in ("static", "eplb")]
    good = policy_answer("gimbal_refined", file, config)
    worst = tables(answers, np.arange(LAYERS) + 10, good)[-1]
    order = np.argsort(good.cost_L - answers[1].cost_L)
    assert list(worst.columns[0].cells) == [str(layer + 10) for layer in order]


def test_what_a_file_lacks_is_an_error(file):
    bare = CountsFile(file.counts_WLSE, file.slot_of_expert_WLE, file.meta)
    with pytest.raises(ValueError, match="moetuner needs a counts file with transitions"):
        policy_answer("moetuner", bare, PlacementConfig())
    with pytest.raises(ValueError, match="sem_moe needs a counts file with request_counts"):
        policy_answer("sem_moe", bare, PlacementConfig())
    with pytest.raises(ValueError, match="window must be from 0 to 1, not 2"):
        one_window(file, 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--policy", "best"),
            "--policy best: must be one of gimbal, gimbal_refined, eplb, eplb_hierarchical, static",
        ),
        (("--window", 2), "window must be from 0 to 1, not 2"),
        (("--nodes", 3), "4 ranks cannot be split over 3 nodes; possible: 1, 2, 4"),
        (("--counts", "none.npz"), "none.npz"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(path, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = place("--counts", path, *arguments)
    assert result.exit_code == 2
    assert result.stderr.splitlines()[-1].startswith("error: ") and message in result.stderr
    assert not list(tmp_path.iterdir())
