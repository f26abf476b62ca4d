"""Facts that processes must agree on, and the message for each difference."""

import dataclasses
import shutil

import pytest

from gimbal_jax.config import (
    DispatchConfig,
    EngineConfig,
    MeshConfig,
    ModelConfig,
    PlacementConfig,
    QueueConfig,
    RopeConfig,
    ServerConfig,
)
from gimbal_jax.serving.cluster import agreement
from gimbal_jax.serving.cluster.agreement import MAX_LENGTH, differences, facts_of
from gimbal_jax.serving.runtime.environment import sources_digest

MODEL = ModelConfig(64, 16, 32, 200, 2, 1, 8, 4, 2, 8, tuple(range(200)))
FACTS = facts_of(MODEL, ServerConfig(), "3fa2", {"save": None, "dtype": "auto"})


def other(value):
    """Return another value of the same type."""
    match value:
        case bool():
            return not value
        case tuple():
            return (*value, 99)
        case str():
            return f"other {value}"
        case None:
            return 1
        case RopeConfig():
            return dataclasses.replace(value, theta=5.0)
        case _:
            return value + 1


def changed(record, field):
    return dataclasses.replace(record, **{field.name: other(getattr(record, field.name))})


def names_that_differ(facts):
    return [line.partition(":")[0] for line in differences(1, facts, FACTS)]


@pytest.mark.parametrize("field", dataclasses.fields(ModelConfig), ids=lambda field: field.name)
def test_every_field_of_the_architecture_is_a_fact(field):
    facts = facts_of(changed(MODEL, field), ServerConfig(), "3fa2", {"save": None, "dtype": "auto"})
    assert names_that_differ(facts) == [f"model.{field.name}" + ".theta" * (field.name == "rope")]


@pytest.mark.parametrize("field", dataclasses.fields(RopeConfig), ids=lambda field: field.name)
def test_every_field_of_the_rotary_embedding_is_a_fact(field):
    model = dataclasses.replace(MODEL, rope=changed(MODEL.rope, field))
    facts = facts_of(model, ServerConfig(), "3fa2", {"save": None, "dtype": "auto"})
    assert names_that_differ(facts) == [f"model.rope.{field.name}"]


@pytest.mark.parametrize("part", ["mesh", "engine"])
def test_every_field_of_mesh_and_engines_is_a_fact(part):
    record = getattr(ServerConfig(), part)
    for field in dataclasses.fields(record):
        config = dataclasses.replace(ServerConfig(), **{part: changed(record, field)})
        assert names_that_differ(facts_of(MODEL, config, "3fa2", {"save": None, "dtype": "auto"})) == [
            f"{part}.{field.name}"
        ]


def test_settings_that_only_the_leader_uses_are_no_facts():
    config = ServerConfig(
        MeshConfig(),
        EngineConfig(),
        DispatchConfig("late"),
        QueueConfig("fcfs"),
        PlacementConfig("static", min_gain=0.5),
    )
    assert facts_of(MODEL, config, "3fa2", {"save": None, "dtype": "auto"}) == FACTS
    config = ServerConfig(placement=PlacementConfig(rows_per_pair=3))
    assert names_that_differ(facts_of(MODEL, config, "3fa2", {"save": None, "dtype": "auto"})) == [
        "placement.rows_per_pair"
    ]


def test_versions_checkpoint_options_and_source_files_are_facts(monkeypatch):
    monkeypatch.setattr(agreement, "__version__", "9.9")
    monkeypatch.setattr(agreement, "installed_version", lambda package: {"jaxlib": "9.8"}.get(package, FACTS[package]))
    monkeypatch.setattr(agreement, "sources_digest", lambda folder: "0" * 64)
    facts = facts_of(MODEL, ServerConfig(), "91bc", {"save": "/out", "dtype": "auto"})
    assert differences(2, facts, FACTS) == [
        f"gimbal_jax: {FACTS['gimbal_jax']} in process 0, 9.9 in process 2",
        f"jaxlib: {FACTS['jaxlib']} in process 0, 9.8 in process 2",
        "checkpoint: 3fa2 in process 0, 91bc in process 2",
        "save: none in process 0, /out in process 2",
        f"source files: {FACTS['source files']} in process 0, 0000000000000000 in process 2",
    ]


def test_a_missing_fact_is_a_difference_and_equal_facts_are_none():
    assert differences(1, FACTS, FACTS) == []
    assert differences(1, {"b": "2"}, {"a": "1"}) == [
        "a: 1 in process 0, none in process 1",
        "b: none in process 0, 2 in process 1",
    ]


def test_long_facts_are_replaced_by_their_hash():
    assert max(map(len, FACTS.values())) <= MAX_LENGTH
    assert FACTS["model.moe_layers"].startswith("#")


def test_the_digest_of_sources_depends_only_on_content_and_names(tmp_path):
    package, copy = tmp_path / "package", tmp_path / "elsewhere"
    (package / "part").mkdir(parents=True)
    (package / "part" / "module.py").write_text("a = 1")
    (package / "data.json").write_text("{}")
    digest = sources_digest(package)
    shutil.copytree(package, copy)
    (copy / "part" / "module.pyc").write_bytes(b"compiled")
    assert sources_digest(copy) == digest
    (copy / "data.json").write_text("[]")
    assert sources_digest(copy) != digest
    (copy / "data.json").rename(copy / "other.json")
    (copy / "other.json").write_text("{}")
    assert sources_digest(copy) != digest
