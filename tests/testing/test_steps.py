"""The end of a test: operations that failed or that some ranks never called fail it, in one inner run."""

from __future__ import annotations

import pytest

from .conftest import Project, Run
from .projects import HEAD

TESTS = """
    backends = pytest.mark.ranks(2, backend=["shm", "gloo"], timeout=20)

    @backends
    async def test_dropped(comm):
        await comm.barrier()
        if comm.rank == 0:
            comm.all_reduce(torch.ones(3))  # dropped here

    @pytest.mark.ranks(2, backend="shm")
    async def test_uneven(comm):
        await comm.barrier()
        if comm.rank == 0:
            await comm.broadcast(torch.ones(3), 0)  # more here

    @pytest.mark.ranks(2, backend="gloo")
    async def test_uneven_own():
        async with asynccomm.new_comm("gloo", name="mine") as mine:
            await mine.barrier()
            if mine.rank == 0:
                with pytest.raises(asynccomm.BackendError):
                    await mine.all_reduce(torch.ones(3))
            await asyncio.sleep(0)

    @pytest.mark.ranks(2, backend="gloo")
    async def test_awaited(comm):
        if comm.rank == 0:
            await comm.all_reduce(torch.ones(3))  # awaited here

    @pytest.mark.ranks(2, backend=["shm", "gloo"], timeout=20)
    async def test_fine(comm):
        comm.all_reduce(torch.ones(3))
        if comm.rank == 0:
            comm.send(torch.ones(2), 1)
        else:
            await comm.recv(torch.ones(2), 0)
        comm.barrier()
        work = comm.all_reduce(torch.ones(3))
        async with asynccomm.new_comm(comm.backend, name="agreed", ordering="agreed") as agreed:
            tags = ["a", "b"] if comm.rank == 0 else ["b", "a"]
            for tag in tags:
                agreed.all_reduce(torch.ones(1), tag=tag)

    @pytest.mark.ranks(2)
    async def test_seen(comm):
        await comm.barrier()
        if comm.rank == 0:
            work = comm.all_reduce(torch.ones(3))
            comm.abort("enough")
            with pytest.raises(asynccomm.AbortedError):
                await work
        else:
            with pytest.raises(asynccomm.AbortedError):
                await comm.recv(torch.ones(1), 0)
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    ini = "[pytest]\nasyncio_default_fixture_loop_scope = function\n"
    return Project(tmp_path_factory.mktemp("steps"), {"test_it.py": HEAD + TESTS, "pytest.ini": ini}).run()


def line(text: str) -> int:
    """The line of the inner test file that has ``text``."""
    return 1 + (HEAD + TESTS).splitlines().index(next(one for one in (HEAD + TESTS).splitlines() if text in one))


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_failed_and_never_awaited(run: Run, backend: str) -> None:
    text = run.text(f"test_dropped[2ranks-{backend}]")
    if "passed, but operations failed and were never awaited" in text:  # not if the comm broke by the same error
        assert "<Work #1 all_reduce(float32[3], SUM) failed: BackendError>: the error was never retrieved: " in text
    else:
        assert "never called these collectives" in text
    assert f"test_it.py:{line('# dropped here')} in test_dropped" in text


def test_never_called(run: Run) -> None:
    text = run.text("test_uneven[2ranks]")
    assert text.startswith(
        "comm 'test': ranks [1] never called these collectives of other ranks:\n"
        "  #1 broadcast(float32[3], root=0) on ranks [0] at "
    )
    assert f"test_it.py:{line('# more here')} in test_uneven\n" in text
    assert text.endswith("the ranks' random number generators were seeded by 0 (--ranks-seed=0)")


def test_never_called_and_awaited(run: Run) -> None:
    text = run.text("test_awaited[2ranks]")
    assert text.startswith("rank 0 of 2 failed: asynccomm.errors.BackendError: ")
    assert "comm 'test': ranks [1] never called these collectives of other ranks:\n  #0 all_reduce(float32[3]" in text


@pytest.mark.parametrize("name", ["test_fine[2ranks-shm]", "test_fine[2ranks-gloo]", "test_seen[2ranks]"])
def test_nothing_is_wrong(run: Run, name: str) -> None:
    assert run.only(name)["outcome"] == "passed", run.only(name)["text"]


def test_an_error_that_the_test_has_seen(run: Run) -> None:
    assert run.only("test_uneven_own[2ranks]")["outcome"] == "passed", "the comm broke, and the test knows"
