"""The process that makes placement decisions (see ``placement_process``). Ends when its standard input does."""

from __future__ import annotations

import os
import pickle
import signal
import sys

NICENESS = 10
"""Steps come first."""


def main() -> None:
    """Reads where modules are found, then calls (function, arguments, named arguments), and answers each in turn.

    An answer is (result, ""), or (None, what was raised, as text).
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all; our parent says when we end
    os.nice(NICENESS)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a policy prints is no answer
    calls = open(0, "rb", closefd=False)  # noqa: SIM115 it lives as long as the process
    sys.path[:] = pickle.load(calls)
    while calls.peek(1):
        try:
            function, arguments, named = pickle.load(calls)
            answer = pickle.dumps((function(*arguments, **named), ""))
        except Exception as error:
            answer = pickle.dumps((None, str(error) or type(error).__name__))
        answers.write(answer)
        answers.flush()


if __name__ == "__main__":
    main()
