"""Ranks that may be killed and stopped: forks of one process that has imported everything, which costs seconds once.

Run as a script it is that process: it reads a line of JSON for each job, and answers with one line.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

SECONDS = 40.0  # for one job


class Nursery:
    """The parent of the ranks, seen from a test."""

    def __init__(self, path: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )

    def run(self, scenario: Callable[..., Any], size: int, *arguments: Any, agent: bool = True) -> dict[int, Any]:
        """What ``await scenario(rank, *arguments)`` returns on each of ``size`` ranks that come to their end."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        job = {"scenario": scenario.__name__, "size": size, "arguments": arguments, "agent": agent}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        said = {int(rank): result for rank, result in json.loads(self._process.stdout.readline()).items()}
        for rank, result in said.items():
            assert not isinstance(result, str), f"rank {rank}: {result}"
        return said

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(SECONDS)
        self._process.stdout.close()


def serve_jobs(path: str) -> None:
    spec = importlib.util.spec_from_file_location("scenarios", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scenarios"] = module
    spec.loader.exec_module(module)
    for line in sys.stdin:
        job = json.loads(line)
        # a process of its own also for the store's server, whose threads no rank may inherit
        print(json.dumps(_in_child(lambda job=job: _run_job(getattr(module, job["scenario"]), job))), flush=True)


def _in_child(call: Callable[[], Any]) -> Any:
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(ours)
        with os.fdopen(theirs, "w") as out:
            json.dump(call(), out)
            out.flush()
        os._exit(0)
    os.close(theirs)
    with os.fdopen(ours) as answer:
        text = answer.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def _run_job(scenario: Callable[..., Any], job: dict[str, Any]) -> dict[int, Any]:
    from asynccomm.store.server import listen, serve

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        WORLD_SIZE=str(job["size"]),
        TORCHELASTIC_USE_AGENT_STORE=str(job["agent"]),
    )
    pipes, pids = [], []
    for rank in range(job["size"]):
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.environ["RANK"] = str(rank)
            _be_rank(scenario, rank, job["arguments"], theirs)
        os.close(theirs)
        pipes.append(ours)
        pids.append(pid)
    server = serve("127.0.0.1", listen("127.0.0.1", port)) if job["agent"] else None
    results = _watch(pids, pipes)
    if server is not None:
        server.release()
    return results


def _be_rank(scenario: Callable[..., Any], rank: int, arguments: Sequence[Any], out: int) -> None:
    try:
        result = asyncio.run(scenario(rank, *arguments))
    except BaseException:
        result = traceback.format_exc()
    os.write(out, json.dumps(result).encode())
    os._exit(0)


def _watch(pids: Sequence[int], pipes: Sequence[int]) -> dict[int, Any]:
    """Wait for all; whoever is stopped goes on once the others have ended."""
    left = dict(enumerate(pids))
    end = time.monotonic() + SECONDS
    stopped: set[int] = set()
    killed: set[int] = set()
    while left:
        for rank, pid in list(left.items()):
            found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                stopped.add(rank)
            elif found:
                del left[rank]
        if left and stopped >= left.keys():
            for rank in left:
                os.kill(left[rank], signal.SIGCONT)
            stopped.clear()
        if left and time.monotonic() > end:
            for rank in left.keys() - killed:
                killed.add(rank)
                os.kill(left[rank], signal.SIGKILL)
        time.sleep(0.005)
    results: dict[int, Any] = {}
    for rank, pipe in enumerate(pipes):
        with os.fdopen(pipe) as answer:
            text = answer.read()
        if text:
            results[rank] = json.loads(text)
        elif rank in killed:
            results[rank] = f"was still at it after {SECONDS:g} s"
    return results


if __name__ == "__main__":
    serve_jobs(sys.argv[1])
