"""A process that has the stub library preloaded: runs the Python that it gets, a JSON line per piece, and reports."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from asynccomm.backends.nccl import api
from asynccomm.backends.nccl.bindings import load


def run(source: str, settings: dict[str, str]) -> dict[str, object]:
    log = Path(os.environ["NCCL_STUB_LOG"])
    log.write_text("")
    names = {f"NCCL_STUB_{name}": value for name, value in settings.items()}
    os.environ.update(names)
    value: object = None
    error = None
    try:
        value = eval(source, scope)
    except api.BackendError as exc:
        error = {"text": str(exc), "code": getattr(exc, "code", None), "cause": type(exc.__cause__).__name__}
    for name in names:
        del os.environ[name]
    return {"value": value if isinstance(value, (int, str)) else repr(value), "error": error, "calls": log.read_text()}


def comm(address: int) -> api.CommHandle:
    import nccl.bindings.nccl as bindings

    return bindings.Comm(address)


def window(address: int) -> api.NcclWindowHandle:
    import nccl.bindings.nccl as bindings

    return bindings.Window(address)


scope = {"nccl": load(), "comm": comm, "window": window, "Config": api.Config, "kept": {}}
for line in sys.stdin:
    print(json.dumps(run(**json.loads(line))), flush=True)
