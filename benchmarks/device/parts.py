"""Run the parts of the check one by one, isolated from each other.

On a GPU every part has a process of its own. A kernel that hangs is killed with its process, an illegal access does not
affect another part's CUDA context, and all memory is free again when the process ends.
"""

from __future__ import annotations

import logging
import multiprocessing
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.device.setting import Setting

Result = tuple[str, dict[str, Any]]
"""(name within its part, numbers with their units in their names). ``ok`` is False if a check failed."""


@dataclass(frozen=True)
class Part:
    """One part of the check. ``run`` yields results one by one, so that an early end keeps the earlier ones."""

    name: str
    run: Callable[[Setting], Iterator[Result]]
    limit_s: float
    """Seconds after which the part is stopped, if it runs in a process of its own."""


Execute = Callable[[Part, Setting, float], Iterator[Result]]
"""A function that runs a part for at most a number of seconds. It raises any error, or TimeoutError at the limit."""


class AbsentError(RuntimeError):
    """A part cannot run here because something that it needs is not installed. This is not a failure."""


def run_parts(
    parts: Sequence[Part],
    setting: Setting,
    budget_s: float,
    execute: Execute,
    clock: Callable[[], float],
    say: Callable[[str], None],
) -> list[dict[str, Any]]:
    """Run the parts in order and return a record of each, in the form of ``benchmarks.device.check``.

    Later parts see the results of earlier ones.
    """
    began, records = clock(), []
    for number, part in enumerate(parts, start=1):
        left_s = budget_s - (clock() - began)
        say(f"[{number}/{len(parts)}] {part.name} ({left_s:.0f} s left)")
        record = _run_part(part, setting, left_s, execute, clock, say)
        say(f"      {record['status']} in {record['wall_s']:.1f} s" + f": {record['reason']}" * bool(record["reason"]))
        records.append(record)
        setting = replace(setting, found=setting.found | {part.name: record["results"]})
    return records


def _run_part(
    part: Part,
    setting: Setting,
    left_s: float,
    execute: Execute,
    clock: Callable[[], float],
    say: Callable[[str], None],
) -> dict[str, Any]:
    began, results = clock(), {}
    status, reason = "ok", ""
    # Skip a part if less than a fifth of its limit is left: it would probably end in a timeout without results.
    if left_s < part.limit_s / 5:
        status, reason = "skipped", f"{left_s:.0f} s of the budget are left; it may take {part.limit_s:.0f} s"
    else:
        try:
            for name, result in execute(part, setting, min(part.limit_s, left_s)):
                results[name] = result
                say(f"      {name}: {brief(result)}")
        except AbsentError as error:
            status, reason = "skipped", str(error)
        except TimeoutError:
            status, reason = "timeout", f"stopped after {clock() - began:.0f} s"
        except Exception as error:
            status, reason = "error", f"{type(error).__name__}: {error}"
    wrong = [name for name, result in results.items() if result.get("ok") is False]
    if wrong and status == "ok":
        status, reason = "failed", ", ".join(wrong)
    return {
        "name": part.name, "status": status, "reason": reason, "wall_s": round(clock() - began, 3), "results": results,
    }  # fmt: skip


def brief(result: dict[str, Any]) -> str:
    """Return a result on one line: rounded numbers, and the medians of timings."""
    shown = []
    for key, value in result.items():
        if isinstance(value, dict) and "median_us" in value:
            shown.append(f"{key} {value['median_us']:,.1f} us")
        elif isinstance(value, float):
            shown.append(f"{key} {value:.4g}")
        elif isinstance(value, bool | int | str):
            shown.append(f"{key} {value}")
    return ", ".join(shown)


def in_this_process(part: Part, setting: Setting, limit_s: float) -> Iterator[Result]:
    """Run a part in this process without a limit, for the dry run."""
    yield from part.run(setting)


def in_a_child(part: Part, setting: Setting, limit_s: float) -> Iterator[Result]:
    """Run a part in a new process, which is killed at the limit."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(part, setting, theirs), daemon=True)
    child.start()
    theirs.close()
    deadline = time.monotonic() + limit_s
    try:
        while True:
            if not ours.poll(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            kind, payload = ours.recv()
            if kind == "result":
                yield payload
            elif kind == "absent":
                raise AbsentError(payload)
            elif kind == "error":
                raise RuntimeError(payload)
            else:
                return
    except EOFError:
        child.join()
        raise RuntimeError(f"its process died with exit code {child.exitcode}") from None
    finally:
        child.kill()
        child.join()


def quiet() -> None:
    """Silence tokamax, which warns about every shape without tuning."""
    logging.getLogger("absl").setLevel(logging.ERROR)


def _child(part: Part, setting: Setting, pipe: Connection) -> None:
    quiet()
    try:
        for result in part.run(setting):
            pipe.send(("result", result))
        pipe.send(("done", None))
    except AbsentError as error:
        pipe.send(("absent", str(error)))
    except Exception as error:
        traceback.print_exc()
        pipe.send(("error", f"{type(error).__name__}: {error}"))
