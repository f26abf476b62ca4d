"""Texts of clients to grammars of llguidance, tried in a process of its own.

The library's compilers are recursive native code: a schema of 30 KB whose references form a chain
overflows their stack, which no handler catches, and other texts take them minutes. So this module
also runs as a program, with a small stack and little time, and imports nothing of the package. What
passes there is compiled again by the server, whose threads have a larger stack.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from typing import Literal

import llguidance

Kind = Literal["json_schema", "regex", "grammar", "choice"]

LIMITS = llguidance.LLParserLimits(
    # An ambiguous grammar takes time with the square of a row: 20 ms a token at 500, a second at the library's 2,000.
    # An object with 120 optional properties has a row of 500.
    max_items_in_row=500,
    max_lexer_states=10_000,  # of about 5 KB each
    verbose_errors=False,
)
MAX_CPU_S = 2
_WALL_S = 30.0
"""For machines that are overloaded: it computes for MAX_CPU_S at most."""
_MEMORY_BYTES = 2**30
_STACK_BYTES = 2**20

_WHITESPACE = r" |\n[ \t]{0,32}"
"""Wherever JSON may have some: a space, or a new line and its indentation. Without a bound a model may never end."""
_OPTIONS = '%llguidance {"no_forcing": true}'
"""Where only one text can follow, the model chooses its tokens: the library would tokenize all of it at each step."""
_TRIED_TOKENS = 8


def checked(kind: Kind, text: str) -> str:
    """The grammar that ``text`` means. Takes a tenth of a second. ValueError says why it cannot be had."""
    # -P: the folder of this file has modules named like others.
    command = [sys.executable, "-P", __file__]
    message = json.dumps([kind, text])
    try:
        child = subprocess.run(command, input=message, capture_output=True, text=True, timeout=_WALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise ValueError(f"it takes more than {_WALL_S:.0f} s to compile") from None
    if child.returncode < 0:  # a signal: stack, time or memory ran out
        raise ValueError(f"it is nested too deeply, or takes more than {MAX_CPU_S} s or 1 GiB to compile")
    if child.returncode > 0:
        raise RuntimeError(f"the check of a grammar failed: {child.stderr}")
    grammar, problem = json.loads(child.stdout)
    if problem:
        raise ValueError(problem)
    return str(grammar)


def problem_of(matcher: llguidance.LLMatcher) -> str:
    """What is wrong with a matcher, in one line; empty if nothing is."""
    error = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
    return error.replace("NoExtensionBias", "no text goes on like this")


def _main() -> None:
    """Reads a kind and a text, writes the grammar and what is wrong with it."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(_STACK_BYTES)
    kind, text = json.load(sys.stdin)
    answers: list[tuple[str, str]] = []
    thread = threading.Thread(target=lambda: answers.append(_try(kind, text)))
    thread.start()
    thread.join()
    json.dump(answers[0], sys.stdout)


def _try(kind: Kind, text: str) -> tuple[str, str]:
    try:
        grammar = _convert(kind, text)
    except ValueError as error:
        return "", str(error)
    tokenizer = llguidance.LLTokenizer("byte")
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=LIMITS)
    # Some limits are met only by the rows of the first tokens.
    for _ in range(_TRIED_TOKENS):
        allowed = int.from_bytes(matcher.compute_bitmask(), "little")
        if matcher.is_stopped():
            break
        matcher.consume_token((allowed & -allowed).bit_length() - 1)
    return grammar, problem_of(matcher)


def _convert(kind: Kind, text: str) -> str:
    if kind == "json_schema":
        (whole,) = json.loads(
            llguidance.LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_pattern": _WHITESPACE})
        )["grammars"]
        lark = f"start: %json {json.dumps(whole['json_schema'])}"
    elif kind == "regex":
        lark = f"start: /{llguidance.regex_to_lark(text, '')}/"
    elif kind == "choice":
        # One terminal: as alternatives of a rule, some thousands would be too many for the parser.
        lark = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in json.loads(text))
    else:
        lark = llguidance.grammar_from(kind, text)
    return f"{lark}\n{_OPTIONS}"


if __name__ == "__main__":
    _main()
