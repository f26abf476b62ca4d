import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gimbal_jax.scheduler.counts_file import (
    CountsFileError,
    load_counts,
    load_placement,
    save_counts,
    save_placement,
)
from tests.scheduler.windows import random_placement, traffic

COUNTS_LSE = np.arange(2 * 2 * 4).reshape(2, 2, 4)
SLOT_LE = np.array([[0, 1, 2, 3], [3, 2, 1, 0]], np.int32)
META = {"ranks": 4, "model": "demo", "steps": 200}


@given(traffic(), st.integers(1, 3), st.booleans())
def test_saved_counts_load_unchanged(tmp_path_factory, case, windows, profile):
    counts_LSE, _, ranks = case
    layers, _, experts = counts_LSE.shape
    path = tmp_path_factory.mktemp("counts") / "traffic.npz"
    rng = np.random.default_rng(0)
    counts_WLSE = np.stack([counts_LSE * (w + 1) for w in range(windows)])
    slot_WLE = np.stack([random_placement(rng, layers, experts) for _ in range(windows)])
    extra = {}
    if profile and layers > 1:
        extra = {
            "transitions_LEE": rng.integers(0, 9, (layers - 1, experts, experts)),
            "request_counts_NLE": rng.integers(0, 9, (3, layers, experts)),
        }
    save_counts(path, counts_WLSE, slot_WLE, {"ranks": ranks, "note": "ä"}, **extra)
    file = load_counts(path)
    np.testing.assert_array_equal(file.counts_WLSE, counts_WLSE)
    np.testing.assert_array_equal(file.slot_of_expert_WLE, slot_WLE)
    assert file.counts_WLSE.dtype == np.int64 and file.slot_of_expert_WLE.dtype == np.int32
    assert (file.meta, file.ranks) == ({"ranks": ranks, "note": "ä"}, ranks)
    for name in ("transitions_LEE", "request_counts_NLE"):
        if extra:
            np.testing.assert_array_equal(getattr(file, name), extra[name])
        else:
            assert getattr(file, name) is None
    last_LE, placement_ranks = load_placement(path)
    assert placement_ranks == ranks
    np.testing.assert_array_equal(last_LE, slot_WLE[-1])


def test_one_window_may_lack_its_axis(tmp_path):
    save_counts(tmp_path / "one.npz", COUNTS_LSE, SLOT_LE, META)
    file = load_counts(tmp_path / "one.npz")
    np.testing.assert_array_equal(file.counts_WLSE, COUNTS_LSE[None])
    assert [path.name for path in tmp_path.iterdir()] == ["one.npz"]


def test_placement_file_has_no_counts(tmp_path):
    path = tmp_path / "placement.npz"
    save_placement(path, SLOT_LE, {"ranks": 2})
    slot_LE, ranks = load_placement(path)
    np.testing.assert_array_equal(slot_LE, SLOT_LE)
    assert slot_LE.dtype == np.int32 and ranks == 2
    with pytest.raises(CountsFileError, match=r"placement.npz: must have counts"):
        load_counts(path)


WRONG = {
    "no counts": ({"counts": None}, "must have counts"),
    "no slots": ({"slot_of_expert": None}, "must have slot_of_expert"),
    "no meta": ({"meta": None}, "must have meta"),
    "axes": ({"counts": COUNTS_LSE}, r"counts must be WLSE with every axis at least 1, not \[2, 2, 4\]"),
    "empty": (
        {"counts": COUNTS_LSE[None, :, :0]},
        r"with every axis at least 1, not \[1, 2, 0, 4\]",
    ),
    "layers": (
        {"counts": COUNTS_LSE[None, :1]},
        r"must be \[1, 2, S, 4\], the shape of slot_of_expert, not \[1, 1",
    ),
    "windows": ({"counts": np.tile(COUNTS_LSE, (3, 1, 1, 1))}, r"counts must be \[1, 2, S, 4\]"),
    "negative": ({"counts": COUNTS_LSE[None] - 1}, "counts must be integers of at least 0"),
    "floats": ({"counts": COUNTS_LSE[None] / 2}, "counts must be integers of at least 0"),
    "twice": ({"slot_of_expert": SLOT_LE[None] // 2}, "must hold each of the 4 slots once in every layer"),
    "sources": ({"counts": np.ones((1, 2, 3, 4), int)}, "4 ranks cannot be split over 3 sources"),
    "no ranks": ({"meta": json.dumps({})}, "meta must give ranks, a divisor of 4 experts, not None"),
    "ranks": ({"meta": json.dumps({"ranks": 3})}, "meta must give ranks, a divisor of 4 experts, not 3"),
    "meta list": ({"meta": "[1]"}, "meta must give ranks"),
    "meta text": ({"meta": "ranks"}, "meta must be JSON"),
    "transitions": ({"transitions": np.ones((2, 4, 4), int)}, "transitions must be LEE"),
    "requests": ({"request_counts": np.ones((9, 2, 5), int)}, "request_counts must be NLE"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG)
def test_rejects_invalid_arrays_and_meta(tmp_path, change, message):
    arrays = {"counts": COUNTS_LSE[None], "slot_of_expert": SLOT_LE[None], "meta": json.dumps(META)} | change
    path = tmp_path / "wrong.npz"
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    with pytest.raises(CountsFileError, match=message) as rejected:
        load_counts(path)
    assert str(path) in str(rejected.value)


@pytest.mark.parametrize("content", [b"", b"not a zip file", b"PK\x03\x04 cut off"])
def test_rejects_other_files(tmp_path, content):
    path = tmp_path / "other.npz"
    path.write_bytes(content)
    with pytest.raises(CountsFileError, match=r"must be an \.npz file of arrays"):
        load_counts(path)


def test_rejects_a_single_array_and_pickled_objects(tmp_path):
    np.save(tmp_path / "a.npy", COUNTS_LSE)
    np.savez(tmp_path / "b.npz", counts=np.array([{}], object))
    for name in ("a.npy", "b.npz"):
        with pytest.raises(CountsFileError, match=r"must be an \.npz file of arrays"):
            load_counts(tmp_path / name)


def test_failed_reads_and_writes_leave_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        load_counts(tmp_path / "none.npz")
    with pytest.raises(CountsFileError, match="integers of at least 0"):
        save_counts(tmp_path / "new.npz", -COUNTS_LSE, SLOT_LE, META)
    with pytest.raises(FileNotFoundError):
        save_counts(tmp_path / "none" / "new.npz", COUNTS_LSE, SLOT_LE, META)
    with pytest.raises(TypeError, match="serializable"):
        save_counts(tmp_path / "new.npz", COUNTS_LSE, SLOT_LE, META | {"x": object()})
    assert list(tmp_path.iterdir()) == []
