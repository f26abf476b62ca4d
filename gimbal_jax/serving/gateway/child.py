"""The process of the HTTP gateway: runs ``smg`` with the arguments on its standard input, and ends with its parent."""

from __future__ import annotations

import json
import os
import signal
import threading


def main() -> None:
    """The first line of standard input is a JSON list of smg's arguments: keys among them show in no process list."""
    stdin = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115 it lives as long as the process
    arguments = json.loads(stdin.readline())

    def die_with_parent() -> None:
        os.read(0, 1)  # returns when the parent is gone, however it went
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=die_with_parent, daemon=True).start()
    from smg.launch_router import parse_router_args
    from smg.router import Router

    Router.from_args(parse_router_args(arguments)).start()


if __name__ == "__main__":
    main()
