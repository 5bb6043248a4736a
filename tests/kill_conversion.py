"""Runs conversions that are killed, see test_converter_state.py.

One process imports everything and forks a child per attempt. Before and after everything that reaches the disk (fsync,
replace, rename, unlink, mkdir, rmdir) a child passes a label, at which it can be killed by SIGKILL. Reads JSON lines
{"settings": {…}, "kill_at": [label | null, …]}, where null lets the child finish; answers each with a JSON list, per
attempt the child's exit status and the labels it passed.
"""

import json
import os
import signal
import sys
import tempfile
import traceback
from typing import Any

import torch

from wisparse.converter import report
from wisparse.converter.pipeline import convert


def attempt(settings: dict[str, Any], kill: str | None) -> dict[str, Any]:
    with tempfile.TemporaryFile() as trace:
        child = os.fork()
        if child == 0:
            status = 1
            try:
                _arm(kill, trace.fileno(), settings["output_dir"])
                convert(**settings, progress=False)
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        trace.seek(0)
        return {"status": os.waitstatus_to_exitcode(status), "labels": trace.read().decode().splitlines()}


def _arm(kill: str | None, trace: int, out: str) -> None:
    def point(label: str) -> None:
        os.write(trace, label.encode() + b"\n")
        if label == kill:
            os.kill(os.getpid(), signal.SIGKILL)

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
    report.render_figures = lambda report: {}  # they take longer than the rest of a conversion
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
