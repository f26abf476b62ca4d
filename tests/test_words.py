"""Docstrings, comments and documents use plain words, and no sentence begins with a relative clause."""

import ast
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = [
    path
    for folder in ("gimbal_jax", "benchmarks", "research", "examples", "scripts")
    for path in sorted((ROOT / folder).rglob("*.py"))
    if not path.stem.endswith(("_pb2", "_pb2_grpc"))
]
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    *(path for folder in ("docs", "deploy", "tests", "research") for path in sorted((ROOT / folder).rglob("*.md"))),
]
OPENING = re.compile(r"(?:Who|What|Whatever|Whoever|Of|Those|Such|Nobody|Likewise)\b.*[^?]$")
WORD = re.compile(
    r"\b(?:besides?|in force|whatever|whoever|nobody|anew|of late(?! binding)|pass(?:es|ed|ing) over|for ever|thereof"
    r"|likewise)\b",
    re.IGNORECASE,
)


def found_in(text: str) -> Iterator[str]:
    """Yield the forbidden openings and words of a text, with the sentence around them. Code is ignored."""
    text = re.sub(r"(`+).*?\1", "code", text, flags=re.DOTALL)
    for paragraph in re.split(r"\n\s*(?:\n|(?=[-*|>] |\d+\. |#))", text):
        flat = " ".join(paragraph.split()).removeprefix("- ")
        for sentence in re.split(r"(?<=[.!?]) (?=[A-Z])", flat):
            if OPENING.match(sentence) or WORD.search(sentence):
                yield sentence


def texts_of(path: Path) -> Iterator[str]:
    """Yield the docstrings and comments of a Python file; consecutive lines of comments are one text."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value
    comments: list[str] = []
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            if token.type == tokenize.COMMENT:
                comments.append(token.string.lstrip("#: "))
            elif token.type != tokenize.NL:
                yield " ".join(comments)
                comments = []


def of_root(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PYTHON, ids=of_root)
def test_docstrings_and_comments_use_plain_words(path: Path):
    assert [sentence for text in texts_of(path) for sentence in found_in(text)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=of_root)
def test_documents_use_plain_words(path: Path):
    without_code = re.sub(r"^ *```.*?^ *```$", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert list(found_in(without_code)) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("What it returns.", 1),
        ("A request ends. Who leaves is\nforgotten. The placement in\nforce stays.", 2),
        ("Who leads? The first process. `Of` is code, as is ``in force``.", 0),
        ("- Of all experts two move.\n- They move once.", 1),
        ("# What a step costs", 0),
    ],
)
def test_forbidden_words_are_found(text: str, count: int):
    assert len(list(found_in(text))) == count
