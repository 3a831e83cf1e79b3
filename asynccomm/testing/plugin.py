"""pytest plugin: run a test on real rank processes.

::

    @pytest.mark.ranks(4)
    async def test_sum(comm):
        tensor = torch.tensor([float(comm.rank)])
        await comm.all_reduce(tensor)
        assert tensor.item() == 6

The function runs in ``size`` processes at once, each with its own event loop; ``comm`` is a new comm of all these
ranks. Processes are kept between tests (see ``pool.py``). All other arguments (parametrised values, fixtures such as
``tmp_path``) are made in pytest's own process and pickled. A test without ``comm`` makes its own comms: the environment
variables are set as by a launcher.

Marker: ``ranks(size, *, backend="auto", device="cpu", timeout=60, hints=None)``. ``size`` and ``backend`` may be lists;
the test is then parametrised over them.
"""

from __future__ import annotations

import inspect
import itertools
import pickle
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from asynccomm.testing.protocol import (
    Died,
    Failed,
    Filters,
    Passed,
    RankTask,
    RankWorld,
    Report,
    Setup,
    Skipped,
    TimedOut,
)

if TYPE_CHECKING:
    from asynccomm.testing.pool import RankPool

DEFAULT_TIMEOUT = 60.0  # seconds for one test, without the start of processes

_pool_key = pytest.StashKey["RankPool"]()
_run_numbers = itertools.count()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers",
        "ranks(size, *, backend='auto', device='cpu', timeout=60, hints=None): run the async test on `size` processes, "
        "with a `comm` of them all; size and backend may be lists",
    )


def pytest_unconfigure(config: pytest.Config) -> None:
    pool = config.stash.get(_pool_key, None)
    if pool is not None:
        pool.close()


@pytest.fixture
def comm(request: pytest.FixtureRequest) -> None:
    """The comm of a test marked ``ranks``. It exists in the rank processes only; this fixture checks the marker."""
    if request.node.get_closest_marker("ranks") is None:
        pytest.fail(f"{request.node.nodeid} uses the fixture `comm` without @pytest.mark.ranks(size)", pytrace=False)


@pytest.fixture
def _asynccomm_world(request: pytest.FixtureRequest) -> RankWorld:
    world = request.param
    assert isinstance(world, RankWorld)
    return world


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    worlds, ids = _worlds(marker)
    metafunc.fixturenames.append("_asynccomm_world")
    metafunc.parametrize("_asynccomm_world", worlds, ids=ids, indirect=True)


def _worlds(marker: pytest.Mark) -> tuple[list[RankWorld], list[str]]:
    """All combinations of the marker's sizes and backends, and their test ids."""
    try:
        sizes, backends, world = _arguments(*marker.args, **marker.kwargs)
    except (TypeError, ValueError) as exc:
        message = str(exc).removeprefix("_arguments() ")
        raise pytest.fail.Exception(f"@pytest.mark.ranks: {message}", pytrace=False) from None
    several = not isinstance(marker.kwargs.get("backend", ""), str)
    pairs = list(itertools.product(sizes, backends))
    ids = [f"{size}ranks-{backend}" if several else f"{size}ranks" for size, backend in pairs]
    return [world._replace(size=size, backend=backend) for size, backend in pairs], ids


def _arguments(
    size: Any,
    *,
    backend: Any = "auto",
    device: str = "cpu",
    timeout: Any = DEFAULT_TIMEOUT,
    hints: Any = None,
) -> tuple[list[int], list[str], RankWorld]:
    """The marker's sizes, backends, and a world of the other arguments. Raises: ValueError for a bad argument."""
    sizes = list(size) if isinstance(size, (list, tuple, range)) else [size]
    backends = list(backend) if isinstance(backend, (list, tuple)) else [backend]
    if not sizes or any(isinstance(one, bool) or not isinstance(one, int) or one < 1 for one in sizes):
        raise ValueError(f"size must be a positive integer or a list of such, got {size!r}")
    if not backends or not all(isinstance(one, str) for one in backends):
        raise ValueError(f"backend must be a name or a list of names, got {backend!r}")
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    if hints is not None and not isinstance(hints, Mapping):
        raise ValueError(f"hints must be a dict, got {hints!r}")
    return sizes, backends, RankWorld(0, "", str(device), float(timeout), dict(hints or {}))


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("ranks") is None:
        return None
    world = pyfuncitem.callspec.params["_asynccomm_world"]
    assert isinstance(world, RankWorld)
    reports, output = _pool(pyfuncitem.config).run(_jobs(pyfuncitem, world), world.timeout)
    for rank, text in enumerate(output):
        if text:
            pyfuncitem.add_report_section("call", f"rank {rank} output", text)
    _raise(reports, world)
    return True


def _pool(config: pytest.Config) -> RankPool:
    pool = config.stash.get(_pool_key, None)
    if pool is None:
        import_mode = config.getoption("importmode")
        args = [f"--rootdir={config.rootpath}", f"--import-mode={import_mode}", "-Wignore"]
        if config.inipath is not None:
            args += ["-c", str(config.inipath)]
        # imported late: it imports torch, and pytest runs without such tests should not wait for that
        pool = import_module("asynccomm.testing.pool").RankPool(
            Setup(list(sys.path), str(config.invocation_params.dir), args)
        )
        config.stash[_pool_key] = pool
    return pool


def _jobs(item: pytest.Function, world: RankWorld) -> list[RankTask]:
    function = getattr(item.cls or item.module, item.originalname)
    if not inspect.iscoroutinefunction(function):
        pytest.fail(f"{item.nodeid}: a test marked `ranks` must be an async function", pytrace=False)
    names = [name for name in inspect.signature(function).parameters if name in item.funcargs]
    arguments = {name: item.funcargs[name] for name in names if name != "comm"}
    prefix = f"{item.cls.__qualname__}." if item.cls is not None else ""
    store = _pool(item.config).store
    run = next(_run_numbers)
    return [
        RankTask(
            path=str(item.path),
            qualname=prefix + item.originalname,
            arguments=_pickled(arguments),
            wants_comm="comm" in names,
            world=world,
            rank=rank,
            env=_environment(rank, world.size, store.host, store.port, run),
            filters=_filters(item),
        )
        for rank in range(world.size)
    ]


def _filters(item: pytest.Item) -> Filters:
    return Filters(
        ini=item.config.getini("filterwarnings"),
        command_line=item.config.known_args_namespace.pythonwarnings or [],
        markers=[text for marker in item.iter_markers("filterwarnings") for text in marker.args],
    )


def _pickled(arguments: Mapping[str, Any]) -> bytes:
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as exc:  # __reduce__ may raise any exception
            message = f"argument {name!r} cannot be sent to the rank processes: {exc}; make it inside of the test"
            raise pytest.fail.Exception(message, pytrace=False) from None
    return pickle.dumps(arguments)


def _environment(rank: int, size: int, host: str, port: int, run: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": f"pytest-{run}",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }


def _raise(reports: Sequence[Report], world: RankWorld) -> None:
    """Pass, skip or fail the test, by the reports of its ranks."""
    if all(isinstance(report, Passed) for report in reports):
        return
    skipped = [report for report in reports if isinstance(report, Skipped)]
    if len(skipped) == len(reports):
        pytest.skip(skipped[0].reason)
    # the cause first: ranks that failed only because of another rank's failure come last
    order = sorted(range(len(reports)), key=lambda rank: _weight(reports[rank]))
    parts = [text for rank in order if (text := _describe(rank, reports[rank], world))]
    if skipped:
        parts.insert(0, f"only {len(skipped)} of {world.size} ranks skipped the test; all have to, or none")
    pytest.fail("\n\n".join(parts), pytrace=False)


def _weight(report: Report) -> int:
    match report:
        case Died():
            return 0
        case Skipped():
            return 1
        case Failed(aborted_by=None):
            return 2
        case TimedOut():
            return 3
        case _:
            return 4


def _describe(rank: int, report: Report, world: RankWorld) -> str:
    """The outcome of one rank, for the failure message; empty if it passed."""
    who = f"rank {rank} of {world.size}"
    match report:
        case Failed(summary, traceback, None):
            return f"{who} failed: {summary}\n{traceback}"
        case Failed(_, traceback, by, awaited):
            what = f"waiting for {awaited}" if awaited else "still at it"
            return f"{who} was {what} when rank {by} left the test, here:\n{traceback}"
        case Died(how):
            return f"{who} {how}"
        case TimedOut(stacks):
            return f"{who} was still waiting and had to be ended, here:\n{stacks}"
        case Skipped(reason):
            return f"{who} skipped: {reason}"
        case _:
            return ""
