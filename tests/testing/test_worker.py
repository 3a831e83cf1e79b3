"""A real rank process, spoken to as the pool does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from asynccomm.testing.fixtures import pack
from asynccomm.testing.protocol import (
    DumpStacks,
    Failed,
    Filters,
    Passed,
    Preparation,
    RankTask,
    RankWorld,
    Setup,
    Skipped,
    StackDump,
    Stale,
    Surroundings,
)

NONE = Filters([], [], [])
HERE = Surroundings(dict(os.environ), os.getcwd())
DEADLINE = 60.0  # seconds; it has to import torch

TESTS = """
    import asyncio, os, resource, signal, sys, time, warnings
    import pytest

    class NoRepr(Exception):
        def __repr__(self):
            raise LookupError("no repr")

        def __call__(self, *_):
            pass

    async def fails_without_a_repr():
        raise NoRepr("its own text")

    async def leaves_a_handler_without_a_repr():
        signal.signal(signal.SIGUSR1, NoRepr())

    async def finds_the_usual_handlers():
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
        assert signal.getsignal(signal.SIGINT).keywords["main_task"] is asyncio.current_task()

    async def cannot_be_undone():
        usual = time.tzset

        def fails():
            time.tzset = usual
            raise OSError("no time zone")

        time.tzset = fails

    async def skips():
        pytest.skip("no need")

    async def fails():
        assert "ONLY_NOW" in os.environ, "as it was before"

    async def warns():
        warnings.warn("a [literal] dot.")

    class Group:
        class Inner:
            async def method(self):
                raise asyncio.CancelledError

    async def closes_stdout():
        sys.stdout.close()

    async def lowers_a_hard_limit():
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard - 1))
        usual = resource.setrlimit

        def refuses(*_):  # as for a process without privileges
            resource.setrlimit = usual
            raise ValueError("not allowed to raise maximum limit")

        resource.setrlimit = refuses

    async def closes_a_descriptor():
        os.close(2)

    async def makes_a_mess():
        import torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        await skips()

    async def waits():
        await asyncio.get_running_loop().create_future()  # for ever
"""


class Process:
    """The worker and our end of its channel."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "test_inner.py"
        self.path.write_text(textwrap.dedent(TESTS))
        ours, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", "asynccomm.testing.worker", str(theirs.fileno())]
            self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        self.channel = Connection(ours.detach())
        arguments = [f"--rootdir={directory}", "--import-mode=importlib", "-Wignore", "-c", "/dev/null"]
        self.channel.send(Setup(list(sys.path), str(directory), arguments))

    def receive(self) -> Any:
        assert self.channel.poll(DEADLINE)
        return self.channel.recv()

    def start(self, name: str, filters: Filters = NONE, **env: str) -> None:
        world = RankWorld(1, "auto", "cpu", 60.0, {})
        self.channel.send(RankTask(str(self.path), name, pack({}), [], False, world, 0, env, filters, HERE))

    def prepare(self) -> Any:
        self.channel.send(Preparation(str(self.path), HERE, NONE))
        return self.receive()

    def run(self, name: str, filters: Filters = NONE, **env: str) -> Any:
        self.start(name, filters, **env)
        return self.receive()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    worker = Process(tmp_path_factory.mktemp("worker"))
    try:
        assert worker.receive() == "ready"
        yield worker
    finally:
        worker.channel.close()
        worker.process.kill()
        worker.process.wait()


def test_environment_is_for_one_job(worker: Process) -> None:
    report = worker.run("fails", ONLY_NOW="yes")
    assert isinstance(report, Passed)
    assert report.seconds >= 0
    report = worker.run("fails")
    assert isinstance(report, Failed)
    assert report.summary.startswith("AssertionError: as it was before\nassert 'ONLY_NOW' in environ")
    assert (report.aborted_by, report.waited_for) == (None, None)


def test_skip(worker: Process) -> None:
    assert worker.run("skips") == Skipped("no need")


def test_nested_classes_and_base_exceptions(worker: Process) -> None:
    report = worker.run("Group.Inner.method")
    assert isinstance(report, Failed)
    assert "CancelledError" in report.summary
    assert "raise asyncio.CancelledError" in report.traceback


def test_an_object_without_a_repr_stays_with_its_test(worker: Process) -> None:
    report = worker.run("fails_without_a_repr")
    assert isinstance(report, Failed)
    assert report.summary.endswith("NoRepr: its own text")
    assert 'raise NoRepr("its own text")' in report.traceback
    assert isinstance(worker.run("finds_the_usual_handlers"), Passed)
    assert isinstance(worker.run("leaves_a_handler_without_a_repr"), Passed)
    assert isinstance(worker.run("finds_the_usual_handlers"), Passed)


@pytest.mark.parametrize(
    ("filters", "kind"),
    [
        (Filters(["error"], [], []), Failed),
        (Filters([], ["error:a [literal] dot."], []), Failed),
        (Filters(["error:a [literal] dot."], [], []), Passed),  # a regular expression here: "a l dot?"
        (Filters(["error"], ["ignore"], []), Passed),
        (Filters(["ignore"], [], ["error"]), Failed),
    ],
)
def test_warning_filters(worker: Process, filters: Filters, kind: type[object]) -> None:
    assert type(worker.run("warns", filters)) is kind


def test_a_function_that_is_not_there(worker: Process) -> None:
    report = worker.run("absent")
    assert isinstance(report, Failed)
    assert "absent" in report.summary


def test_stale_processes_say_so(worker: Process) -> None:
    assert worker.prepare() == "ready"
    before = worker.path.stat()
    os.utime(worker.path, ns=(1, 1))
    assert worker.prepare() == Stale(f"{worker.path} has changed since it was imported")
    os.utime(worker.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert worker.prepare() == "ready"
    assert isinstance(worker.run("lowers_a_hard_limit"), Passed), "no error of the test"
    assert worker.prepare() == Stale("a test has lowered a hard resource limit, which this process may not raise")
    assert isinstance(worker.run("closes_a_descriptor"), Passed)
    assert worker.prepare() == Stale("a test has closed or replaced one of the descriptors 0 to 2")
    assert isinstance(worker.run("closes_stdout"), Passed)
    assert worker.prepare() == Stale("sys.stdout is closed")
    assert worker.run("makes_a_mess") == Skipped("no need")
    assert worker.prepare() == Stale("torch's default process group is still initialized")
    report = worker.run("cannot_be_undone")
    assert isinstance(report, Failed)
    assert "no time zone" in report.summary
    assert worker.prepare() == Stale("the state before an earlier test could not be set back")
    assert worker.run("skips") == Skipped("no need")
    assert isinstance(worker.prepare(), Stale), "later tests change nothing about that"


def test_tells_where_it_is_and_ends_with_its_parent(worker: Process) -> None:
    worker.start("waits")
    text = ""
    while "# for ever" not in text:  # it may be asked before it is there
        worker.channel.send(DumpStacks())
        answer = worker.receive()
        assert isinstance(answer, StackDump)
        text = answer.text
    assert "test_inner.py" in text
    worker.channel.close()
    assert worker.process.wait(DEADLINE) == 0
