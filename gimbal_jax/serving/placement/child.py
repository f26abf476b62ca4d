"""Program of the placement process (see ``process``). It ends when its standard input ends."""

from __future__ import annotations

import os
import pickle
import signal
import sys

NICENESS = 10
"""Added to the process's niceness, so that steps have priority over decisions."""


def main() -> None:
    """Read calls from standard input and answer each on standard output, both as pickles.

    The first object is ``sys.path``. Each call is (function, arguments, keyword arguments). Its answer is (result, ""),
    or (None, message) if the function raised.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to all processes; the parent ends this one
    os.nice(NICENESS)
    # Answers get the original standard output; the prints of a policy go to standard error.
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    calls = open(0, "rb", closefd=False)  # noqa: SIM115 it stays open as long as the process lives
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
