"""Conversion of clients' constraints to llguidance grammars, tried in a separate process.

The library's compilers are recursive native code. A schema of 30 KB whose references form a chain
overflows their stack, and no handler catches that. Other texts take minutes to compile. So this module
also runs as a program, with a small stack and little CPU time, and imports nothing of the package.
If the check passes, the server compiles the text a second time, in a thread with a larger stack.
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
    # The time of an ambiguous grammar grows with the square of its longest row: 20 ms a token at 500 items,
    # a second at the library's default of 2,000. An object with 120 optional properties has a row of 500.
    max_items_in_row=500,
    max_lexer_states=10_000,  # of about 5 KB each
    verbose_errors=False,
)
MAX_CPU_S = 2
_WALL_S = 30.0
"""Limit for overloaded hosts. The child uses at most MAX_CPU_S of CPU time."""
_MEMORY_BYTES = 2**30
_STACK_BYTES = 2**20

_WHITESPACE = r" |\n[ \t]{0,32}"
"""White space that JSON may have: a space, or a new line and its indentation. Unbounded, a model might never end."""
_OPTIONS = '%llguidance {"no_forcing": true}'
"""Let the model choose the tokens of a forced text. Otherwise the library tokenizes all of that text at each step."""
_TRIED_TOKENS = 8


def checked(kind: Kind, text: str) -> str:
    """Return the grammar of ``text``. Takes a tenth of a second. Raises ValueError with the reason if there is none."""
    # -P keeps the folder of this file off the path, because its modules could hide others of the same name.
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
    """Return the error of a matcher in one line, empty if there is none."""
    error = " ".join(matcher.get_error().removesuffix("<non-verbose/>").split())
    return error.replace("NoExtensionBias", "no text can follow")


def _main() -> None:
    """Read a kind and a text from standard input, and write the grammar and its error to standard output."""
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
    # The rows of the first tokens reach some limits that compiling does not.
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
        # All choices are one terminal. Some thousand alternatives of a rule would be too many for the parser.
        lark = "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(choice) for choice in json.loads(text))
    else:
        lark = llguidance.grammar_from(kind, text)
    return f"{lark}\n{_OPTIONS}"


if __name__ == "__main__":
    _main()
