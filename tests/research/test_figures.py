"""Pictures of made-up results show the values of these results."""

import matplotlib.image
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from research.experiments import ABLATION, experiments
from research.figures import draw_ablation, draw_figures, draw_latencies, draw_throughput
from research.store import ResultStore
from research.study_figures import draw_multihost, draw_pressure_weights
from tests.research.results_made_up import SCOPE, made_up_store


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> ResultStore:
    return made_up_store(tmp_path_factory.mktemp("results"))


def heights(axes: Axes) -> list[float]:
    return [bar.get_height() for bar in axes.patches if isinstance(bar, Rectangle)]


def test_every_figure_and_study_is_drawn(store, tmp_path):
    names = tuple(experiments(SCOPE))
    paths = list(draw_figures(store, SCOPE, names, tmp_path))
    assert len(set(paths)) == len(paths)
    for name in names:
        begin = f"figure_{name}" if name.isdigit() else f"study_{name}"
        assert any(path.stem == begin or path.stem.startswith(f"{begin}_") for path in paths), name
    for path in paths:
        pixels = matplotlib.image.imread(path)[:, :, :3]
        assert min(pixels.shape[:2]) > 300 and 0.005 < (pixels.min(axis=2) < 0.9).mean() < 0.9, path


def test_figures_without_results_are_not_drawn(tmp_path):
    empty = ResultStore(tmp_path / "results.jsonl")
    assert list(draw_figures(empty, SCOPE, tuple(experiments(SCOPE)), tmp_path)) == []
    some = made_up_store(tmp_path / "some", ("2", "multihost"))
    drawn = [path.stem for path in draw_figures(some, SCOPE, tuple(experiments(SCOPE)), tmp_path)]
    assert drawn == ["figure_2", "study_multihost"]


def test_lines_show_the_mean_at_each_load(store):
    figures = dict(draw_latencies(store, SCOPE))
    figure = figures["figure_9_paper_like"]
    axes = figure.axes[0]
    by_label = {str(line.get_label()): line for line in axes.get_lines()}
    assert list(by_label) == ["vllm", "moetuner", "sem_moe", "gimbal", "gimbal+"]
    assert by_label["vllm"].get_xdata() == pytest.approx([2.0, 4.0])
    assert by_label["vllm"].get_ydata() == pytest.approx([20.0, 40.0])
    assert by_label["gimbal"].get_ydata() == pytest.approx([16.0, 32.0])
    assert [top.get_title() for top in figure.axes[: len(SCOPE.shapes)]] == list(SCOPE.shapes)
    assert axes.get_ylabel() == "latency, s" and "paper_like" in figure.get_suptitle()
    assert [text.get_text() for text in figures["figure_9_graph"].axes[0].get_xticklabels()] == ["50%", "95%"]


def test_ablation_bars_are_ratios_to_vllm(store):
    axes = dict(draw_ablation(store, SCOPE))["figure_11_paper_like"].axes[0]
    assert heights(axes) == pytest.approx([1.0, 0.95, 0.9, 0.9, 0.8, 0.7])
    assert [tick.get_text() for tick in axes.get_xticklabels()] == list(ABLATION)


def test_throughput_is_normalised_and_raw(store):
    ratio, raw = dict(draw_throughput(store, SCOPE))["figure_10_paper_like"].axes
    assert heights(ratio) == pytest.approx([1.0] * 8)
    assert heights(raw) == pytest.approx([4.0] * 4)


def test_several_nodes_have_one_line_per_system(store):
    ((_, figure),) = draw_multihost(store, SCOPE)
    by_label = {str(line.get_label()): line for line in figure.axes[0].get_lines()}
    assert len(figure.axes) == 6 and len(by_label) == 6
    assert len({line.get_color() for line in by_label.values()}) == 6
    assert np.allclose(by_label["gimbal"].get_ydata(), 0.5 * np.array(by_label["static"].get_ydata()))


def test_pressure_is_shown_against_weight_zero(store):
    (_, figure), *_ = draw_pressure_weights(store, SCOPE)
    stay, move = figure.axes[0].get_lines()[:2]
    assert np.allclose(stay.get_xdata(), [0, 0.5, 1, 2, 4])
    assert np.allclose(stay.get_ydata(), 0) and np.allclose(move.get_ydata(), 0)
