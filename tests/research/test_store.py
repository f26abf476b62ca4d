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


def test_results_are_found_again_by_another_store(tmp_path):
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


def test_every_field_and_the_kind_of_a_scenario_are_in_its_key():
    scenes = [Scene("a"), Scene("b"), Scene("a", rate=4.5), Scene("a", seed=1), OtherScene("a")]
    assert len({scenario_key(scene) for scene in scenes}) == len(scenes)
    assert scenario_key(Scene("a")) == scenario_key(replace(Scene("b"), name="a"))


@pytest.mark.parametrize("torn", ['{"key": "0', '{"key": "0", "result": {}}'])
def test_a_torn_last_line_is_dropped_and_work_goes_on(tmp_path, torn):
    path = tmp_path / "results.jsonl"
    ResultStore(path).add(Scene("a"), {"x": 1})
    with path.open("a") as file:
        file.write(torn)  # no end of line: it may miss anything

    store = ResultStore(path)
    assert len(store) == 1
    store.add(Scene("b"), {"x": 2})
    again = ResultStore(path)
    assert [again[Scene("a")], again[Scene("b")]] == [{"x": 1}, {"x": 2}]
    assert [result["x"] for result in again] == [1, 2]


def test_a_bad_line_before_the_last_is_an_error_with_its_number(tmp_path):
    path = tmp_path / "results.jsonl"
    ResultStore(path).add(Scene("a"), {"x": 1})
    with path.open("a") as file:
        file.write("[]\n")
    with pytest.raises(ValueError, match="line 2 is no result"):
        ResultStore(path)


def test_a_result_that_is_added_twice_counts_once_as_the_later_one(tmp_path):
    store = ResultStore(tmp_path / "results.jsonl")
    store.add(Scene("a"), {"x": 1})
    store.add(Scene("a"), {"x": 2})
    assert ResultStore(store.path)[Scene("a")] == {"x": 2}
    assert len(store) == 1
