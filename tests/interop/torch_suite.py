"""torch's own tests of torch.distributed, which come inside of its wheel, run on a backend.

    python tests/interop/torch_suite.py asynccomm results.json [test ...]

torch starts new processes for each of its tests. Here the ranks stay, and go through the tests together: a test costs
what it does, and no import. A rank that fails, or hangs, ends its test for all; then new ranks go on with the next.

torch decides by the name of the backend what to run. For a fair comparison everything that runs on gloo runs on ours,
and only what names gloo when it runs (the profiler's events of gloo) does not apply.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import traceback
import unittest
from datetime import timedelta
from pathlib import Path
from typing import Any

RANKS = 4
SECONDS = 60.0  # for one test
GROUP_SECONDS = 30.0  # torch has 100: what hangs on gloo is to hang for less
NAMING = ("test_barrier_timeout_global", "test_get_backend", "test_Backend_enum_class")  # tests of the backend's name

Outcomes = dict[str, str]  # by test: "passed", "skipped: why", or why it failed


def run(backend: str, names: list[str] | None = None, ranks: int = RANKS) -> Outcomes:
    """Run the tests called ``names``, or all, on ``backend``."""
    outcomes: Outcomes = {}
    left = list_tests() if names is None else list(names)
    while left:
        for name, outcome in _run_some(backend, left, ranks).items():
            outcomes[name] = outcome
            left.remove(name)
    return outcomes


def list_tests() -> list[str]:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import torch_suite as t; t.print_tests()"
    env = {**os.environ, "BACKEND": "gloo", "WORLD_SIZE": str(RANKS), "TEMP_DIR": tempfile.gettempdir()}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return done.stdout.split()


def _run_some(backend: str, names: list[str], ranks: int) -> Outcomes:
    """Up to the first that does not pass on all ranks."""
    with tempfile.TemporaryDirectory() as folder:
        for part in ("barrier", "test_dir", "init_dir"):
            Path(folder, part).mkdir()
        Path(folder, "lockfile").touch()
        Path(folder, "names").write_text("\n".join(names))
        env = {
            **os.environ,
            "BACKEND": "gloo",
            "WORLD_SIZE": str(ranks),
            "TEMP_DIR": folder,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "TORCH_SHOW_CPP_STACKTRACES": "0",
            "OMP_NUM_THREADS": "1",
        }
        logs = [Path(folder, f"log.{rank}").open("w") for rank in range(ranks)]  # noqa: SIM115  # closed below
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank", backend, str(rank)],
                env={**env, "RANK": str(rank)},
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank, log in enumerate(logs)
        ]
        try:
            return _watch(Path(folder), names, processes)
        finally:
            for process in processes:
                process.kill()
                process.wait()
            for log in logs:
                log.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _watch(folder: Path, names: list[str], processes: list[subprocess.Popen[bytes]]) -> Outcomes:
    """Collect what the ranks leave in files, which are named after the test and the rank."""
    outcomes: Outcomes = {}
    for name in names:
        files = [folder / f"{name}.{rank}" for rank in range(len(processes))]
        end = time.monotonic() + SECONDS + (30 if not outcomes else 0)
        while not all(file.exists() for file in files):
            over = time.monotonic() > end or any(
                process.poll() is not None and not file.exists() for process, file in zip(processes, files, strict=True)
            )
            failed = any(file.exists() and file.read_text().startswith("failed") for file in files)
            if failed:
                end = min(end, time.monotonic() + 5)
            if over:
                break
            time.sleep(0.01)
        said = [file.read_text() if file.exists() else "hung or died" for file in files]
        bad = [f"rank {rank}: {text}" for rank, text in enumerate(said) if not text.startswith(("passed", "skipped"))]
        if bad:
            if os.environ.get("SUITE_LOGS"):
                for rank in range(len(processes)):
                    print(name, rank, Path(folder, f"log.{rank}").read_text()[-3000:])
            outcomes[name] = "\n".join(bad)
            return outcomes
        outcomes[name] = "passed" if "passed" in said else said[0]
        print(name, outcomes[name][:60], flush=True)
    return outcomes


# -- on a rank --------------------------------------------------------------------------------------------------------


def _cases() -> Any:
    from torch.testing._internal.distributed import distributed_test

    class Cases(distributed_test.TestDistBackend, distributed_test.DistributedTest._DistTestBase):  # type: ignore[misc, name-defined]
        def setUp(self) -> None:
            pass

    return distributed_test, Cases


def print_tests() -> None:
    _, cases = _cases()
    print("\n".join(unittest.defaultTestLoader.getTestCaseNames(cases)))


def _rank(backend: str, rank: int) -> None:
    if backend == "asynccomm":
        import asynccomm.interop.torch_backend  # noqa: F401
    suite, cases = _cases()
    folder = Path(os.environ["TEMP_DIR"])
    for name in (folder / "names").read_text().split():
        suite.BACKEND = backend if name in NAMING else "gloo"
        text = _one(suite, cases, backend, rank, name, folder)
        part = folder / f"{name}.{rank}.part"
        part.write_text(text)
        part.rename(folder / f"{name}.{rank}")
        if text.startswith("failed"):
            time.sleep(60)  # the others may still need this one; then all are ended
        others = [folder / f"{name}.{other}" for other in range(int(os.environ["WORLD_SIZE"]))]
        while not all(file.exists() for file in others):
            time.sleep(0.005)
    os._exit(0)


def _one(suite: Any, cases: Any, backend: str, rank: int, name: str, folder: Path) -> str:
    from torch import distributed as dist
    from torch.testing._internal import common_utils

    try:
        case = cases(name)
        case.rank = rank
        case.file_name = str(folder / f"init.{name}")
        suite.Barrier.barrier_id = 0
        seconds = suite.CUSTOM_PG_TIMEOUT.get(name, GROUP_SECONDS)
        dist.init_process_group(
            init_method=f"file://{case.file_name}",
            backend=backend,
            world_size=int(case.world_size),
            rank=rank,
            timeout=timedelta(seconds=seconds),
        )
        common_utils.set_rng_seed()
        mine = folder / "barrier" / str(os.getpid())
        mine.unlink(missing_ok=True)
        dist.barrier()
        outcome = "passed"
        try:
            getattr(case, name)()
        except unittest.SkipTest as exc:
            outcome = f"skipped: {exc}"
        except SystemExit as exc:
            outcome = f"skipped: {exc.code}" if exc.code else "passed"
        suite.Barrier.sync()
        dist.destroy_process_group()
        return outcome
    except BaseException:
        return f"failed: {traceback.format_exc()}"


if __name__ == "__main__":
    if sys.argv[1] == "--rank":
        _rank(sys.argv[2], int(sys.argv[3]))
    found = run(sys.argv[1], sys.argv[3:] or None)
    Path(sys.argv[2]).write_text(json.dumps(found, indent=1))
    kinds = [
        outcome.split(":")[0] if outcome.startswith(("passed", "skipped")) else "failed" for outcome in found.values()
    ]
    print({kind: kinds.count(kind) for kind in sorted(set(kinds))})
