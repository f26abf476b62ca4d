"""The process of the HTTP gateway: ``smg`` with arguments from standard input. It ends with its parent."""

from __future__ import annotations

import json
import os
import signal
import threading


def main() -> None:
    """Run smg with the JSON list of arguments on the first line of standard input.

    The arguments hold keys, which would show in process lists if they came on the command line.
    """
    stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 it lives as long as the process
    arguments = json.loads(stdin.readline())

    def die_with_parent() -> None:
        os.read(0, 1)  # returns when the parent has exited, for any reason
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die_with_parent, daemon=True).start()
    from smg.launch_router import parse_router_args
    from smg.router import Router

    Router.from_args(parse_router_args(arguments)).start()


if __name__ == "__main__":
    main()
