"""Runs conversions that are killed, see test_converter_resume.py and benchmarks/kills.py.

One process imports everything and forks a child per attempt, so that an attempt costs a conversion and not the imports.
Whenever something reaches the disk (fsync, replace, rename, unlink, mkdir, rmdir) a child passes two points, before and
after; each has a label. A kill is one of

    "label"                                  SIGKILL at the point of that label
    {"signal": "SIGINT", "point": 17}        that signal at the 17th point
    {"signal": "SIGTERM", "after": 0.73}     that signal so many seconds after the start

SIGKILL is as when the machine goes down: no handler, no clean-up.

Reads one JSON object per line, {"settings": {…}, "kill_at": [kill | null, …]}, where null lets the child finish, and
the first that finishes is the last; answers each with one line, a JSON list: per attempt the child's exit status, the
labels it passed and its seconds.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from typing import Any

import torch

from wisparse.converter import report
from wisparse.converter.pipeline import convert


def attempt(settings: dict[str, Any], kill: str | dict[str, Any] | None) -> dict[str, Any]:
    """Fork, convert, be killed or finish."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as trace:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                # Whoever starts this in the background of a shell has Ctrl-C ignored, and hands that on.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                _arm(kill, trace.fileno(), settings["output_dir"])
                convert(**settings, progress=False)
                status = 0
            except KeyboardInterrupt:
                status = 130
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        if isinstance(kill, dict) and "after" in kill:
            _wait(child, kill["after"])
            os.kill(child, getattr(signal, kill["signal"]))  # not reaped yet, so the number is still its own
        _, status = os.waitpid(child, 0)
        trace.seek(0)
        return {
            "status": os.waitstatus_to_exitcode(status),
            "labels": trace.read().decode().splitlines(),
            "seconds": time.monotonic() - started,
        }


def _wait(child: int, seconds: float) -> None:
    """Until the time is over or the child is; it stays to be waited for."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return
        time.sleep(0.002)


def _arm(kill: str | dict[str, Any] | None, trace: int, out: str) -> None:
    passed = 0

    def point(label: str) -> None:
        nonlocal passed
        passed += 1
        os.write(trace, label.encode() + b"\n")
        if label == kill:
            os.kill(os.getpid(), signal.SIGKILL)
        elif isinstance(kill, dict) and passed == kill.get("point"):
            os.kill(os.getpid(), getattr(signal, kill["signal"]))

    for verb in ("fsync", "replace", "rename", "unlink", "mkdir", "rmdir"):
        original = getattr(os, verb)

        def counted(target: Any, *args: Any, original: Any = original, verb: str = verb, **kwargs: Any) -> Any:
            path = os.readlink(f"/proc/self/fd/{target}") if isinstance(target, int) else os.fspath(target)
            # Runs into different folders must give equal labels.
            label = f"{verb} {path.replace(out, 'OUT')}"
            point(f"before {label}")
            result = original(target, *args, **kwargs)
            point(f"after {label}")
            return result

        setattr(os, verb, counted)


def main() -> None:
    torch.set_num_threads(1)  # threads do not survive a fork
    if "--plain" in sys.argv[1:]:  # without pictures, which take longer than the rest of a conversion
        report.render_figures = lambda report: {}  # type: ignore[assignment]
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401 - imported once, for all children

    for line in sys.stdin:
        plan = json.loads(line)
        attempts = []
        for kill_at in plan["kill_at"]:
            attempts.append(attempt(plan["settings"], kill_at))
            if attempts[-1]["status"] == 0:
                break
        print(json.dumps(attempts), flush=True)


if __name__ == "__main__":
    main()
