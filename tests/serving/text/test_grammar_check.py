import json
import sys
from typing import Any

import pytest

from gimbal_jax.serving.text.grammar_check import MAX_CPU_S, checked


def chain_of_references(length):
    """Return a schema in which definition n refers to definition n + 1."""
    definitions = {
        f"d{n}": {"type": "object", "properties": {"next": {"$ref": f"#/$defs/d{n + 1}"}}} for n in range(length)
    }
    return json.dumps({"$defs": {**definitions, f"d{length}": {"type": "null"}}, "$ref": "#/$defs/d0"})


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", chain_of_references(30)),
        ("regex", r"\d{3}-\w+"),
        ("choice", json.dumps([f'no. {n} "quoted" \\ 世界 🙂\n/' for n in range(3000)])),
        ("grammar", 'start: "a" B\nB: /[0-9]+/'),
        ("grammar", 'root ::= "a" digit+\ndigit ::= [0-9]'),
    ],
)
def test_valid_constraint_gives_a_grammar(kind, text):
    assert checked(kind, text)


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("json_schema", chain_of_references(2000), "nested too deeply"),  # overflows a stack of 8 MiB
        ("json_schema", '{"items":' * 500 + "{}" + "}" * 500, "recursion limit"),
        ("json_schema", "{", "EOF|JSON"),
        ("json_schema", '{"type": "integer", "minimum": 2, "maximum": 1}', "greater than maximum"),
        ("json_schema", '{"$ref": "https://example.org/schema"}', "not fetch"),
        ("regex", "(?=a)b", "look-around"),
        ("regex", r"(a)\1", "backreference"),
        ("regex", "(" * 1000 + ")" * 1000, "invalid regex"),
        ("grammar", "start: " + "(" * 3000 + '"a"' + ")" * 3000, "nested"),
        ("grammar", "start: A\nA: /a/ & /b/", "no text can follow"),
        ("grammar", 'root ::= "a', "convert"),
        ("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "recursion"),
    ],
    ids=range(12),
)
def test_invalid_constraint_is_rejected_with_the_reason(kind, text, reason):
    with pytest.raises(ValueError, match=reason) as refusal:
        checked(kind, text)
    assert "\n" not in str(refusal.value)


def test_check_stops_after_its_cpu_time():
    # The library takes six seconds for this text, and cannot be interrupted.
    text = "(a*)*" * 25_000
    with pytest.raises(ValueError, match=f"takes more than {MAX_CPU_S} s"):
        checked("regex", text)


def test_failure_of_the_child_is_a_runtime_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="check of a grammar failed"):
        checked("regex", "a")


def test_exception_in_the_child_is_a_runtime_error():
    no_text: Any = 5
    with pytest.raises(RuntimeError, match="IndexError"):
        checked("regex", no_text)
