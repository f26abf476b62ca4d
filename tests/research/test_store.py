from dataclasses import dataclass, replace

import pytest

from research.store import ResultStore, scenario_key


@dataclass(frozen=True)
class Scene:
    name: str
    rate: float = 4.0
    seed: int = 0


@dataclass(frozen=True)
class OtherScene:
    name: str
    rate: float = 4.0
    seed: int = 0


def test_another_store_reads_the_results(tmp_path):
    path = tmp_path / "new folder" / "results.jsonl"
    store = ResultStore(path)
    store.add(Scene("a"), {"ttft_s": 0.1})
    store.add(Scene("b"), {"ttft_s": float("nan")})

    again = ResultStore(path)
    assert len(again) == 2
    assert Scene("a") in again
    assert again[Scene("a")] == {"ttft_s": 0.1}
    assert again[Scene("b")]["ttft_s"] != again[Scene("b")]["ttft_s"]
    assert Scene("a", seed=1) not in again
    with pytest.raises(KeyError):
        again[Scene("c")]


def test_the_key_depends_on_the_class_and_every_field_of_a_scenario():
    scenes = [Scene("a"), Scene("b"), Scene("a", rate=4.5), Scene("a", seed=1), OtherScene("a")]
    assert len({scenario_key(scene) for scene in scenes}) == len(scenes)
    assert scenario_key(Scene("a")) == scenario_key(replace(Scene("b"), name="a"))


@pytest.mark.parametrize("torn", ['{"key": "0', '{"key": "0", "result": {}}'])
def test_an_unfinished_last_line_is_cut_off_and_later_results_are_kept(tmp_path, torn):
    path = tmp_path / "results.jsonl"
    ResultStore(path).add(Scene("a"), {"x": 1})
    with path.open("a") as file:
        file.write(torn)  # without an end of line the result may be incomplete

    store = ResultStore(path)
    assert len(store) == 1
    store.add(Scene("b"), {"x": 2})
    again = ResultStore(path)
    assert [again[Scene("a")], again[Scene("b")]] == [{"x": 1}, {"x": 2}]
    assert [result["x"] for result in again] == [1, 2]


def test_a_bad_line_before_the_last_raises_an_error_with_its_number(tmp_path):
    path = tmp_path / "results.jsonl"
    ResultStore(path).add(Scene("a"), {"x": 1})
    with path.open("a") as file:
        file.write("[]\n")
    with pytest.raises(ValueError, match="line 2 is not a result"):
        ResultStore(path)


def test_a_second_result_of_a_scenario_replaces_the_first(tmp_path):
    store = ResultStore(tmp_path / "results.jsonl")
    store.add(Scene("a"), {"x": 1})
    store.add(Scene("a"), {"x": 2})
    assert ResultStore(store.path)[Scene("a")] == {"x": 2}
    assert len(store) == 1
