"""Test files with their assertions rewritten, once for all processes of a run.

pytest rewrites the assertions of each file that it imports, which takes half of the time of a collection. Each of
xdist's workers imports all files, at the same time, and ranks import the files of their tests. Here the processes of a
run share the rewritten code in a folder, and the workers of xdist divide the files among them before they collect.
"""

from __future__ import annotations

import hashlib
import marshal
import os
import shutil
import tempfile
from pathlib import Path
from types import CodeType
from typing import Final

import pytest
from _pytest.assertion import rewrite

FOLDER: Final = "ASYNCCOMM_TESTS_REWRITTEN"  # the environment variable with the folder of the run

_real_rewrite = getattr(rewrite, "_rewrite_test", None)  # of pytest, which does not promise it
_made: list[str] = []  # folders that this process has made
_folder = Path()  # which a test cannot change with its environment


def install() -> None:
    """From now on, this process and its children rewrite no file that one of them has rewritten."""
    global _folder
    if _real_rewrite is None:
        return
    if not os.path.isdir(os.environ.get(FOLDER, "")):
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="asynccomm-tests-")
        _made.append(os.environ[FOLDER])
    _folder = Path(os.environ[FOLDER])
    rewrite._rewrite_test = rewritten


def remove() -> None:
    """Remove the folder, if this process has made it."""
    while _made:
        shutil.rmtree(_made.pop(), ignore_errors=True)


def rewritten(path: Path, config: pytest.Config) -> tuple[os.stat_result, CodeType]:
    """The code of the file ``path``, with its status."""
    assert _real_rewrite is not None
    status = os.stat(path)
    version = f"{path} {status.st_mtime_ns} {status.st_size}"
    file = _folder / hashlib.sha256(version.encode()).hexdigest()
    try:
        return status, marshal.loads(file.read_bytes())
    except FileNotFoundError:
        pass
    status, code = _real_rewrite(path, config)
    part = file.with_suffix(f".{os.getpid()}")
    try:
        part.write_bytes(marshal.dumps(code))
        part.replace(file)
    except FileNotFoundError:  # the run has ended, and its folder is gone
        pass
    return status, code


def rewrite_share(config: pytest.Config) -> None:
    """In a worker of xdist: rewrite its share of the files that all workers are about to collect."""
    worker, count = os.environ.get("PYTEST_XDIST_WORKER"), os.environ.get("PYTEST_XDIST_WORKER_COUNT")
    if _real_rewrite is None or worker is None or count is None:
        return
    places = [Path(config.invocation_params.dir, argument.partition("::")[0]) for argument in config.args]
    files = [file for place in places for file in ([place] if place.is_file() else sorted(place.rglob("test_*.py")))]
    for file in files[int(worker.removeprefix("gw")) :: int(count)]:
        rewritten(file, config)
