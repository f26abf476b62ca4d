"""Priorities; sampling parameters are tested as part of whole requests, in test_generation.py."""

import pytest

from gimbal_jax.exceptions import InvalidField
from gimbal_jax.serving.rpc.parsing import parse_priority


@pytest.mark.parametrize(("value", "priority"), [("0", 0), ("-100", -100), ("100", 100), ("+7", 7), ("007", 7)])
def test_priority_is_an_integer_in_the_metadata(value, priority):
    metadata = [("user-agent", "grpc"), ("x-gimbal-priority", value)]
    assert parse_priority(metadata, "priority") == priority
    assert parse_priority([], "priority") == 0


@pytest.mark.parametrize("value", ["101", "-101", "1e9", "1.5", "", " 1", "high", "٣", "9" * 50])
def test_other_priorities_are_refused_by_name(value):
    with pytest.raises(InvalidField) as error:
        parse_priority([("x-gimbal-priority", value)], "priority")
    assert str(error.value) == f"x-gimbal-priority must be an integer in [-100, 100], got {value}"


def test_priority_is_refused_where_the_queue_would_not_heed_it():
    assert parse_priority([("x-gimbal-priority", "0")], "sjf_aging") == 0
    with pytest.raises(InvalidField, match="x-gimbal-priority must be 0 where the queue policy is not priority, got 1"):
        parse_priority([("x-gimbal-priority", "1")], "sjf_aging")
