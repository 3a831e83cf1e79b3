"""pytest plugin: run a test on real rank processes.

::

    @pytest.mark.ranks(4)
    async def test_sum(comm):
        tensor = torch.tensor([float(comm.rank)])
        await comm.all_reduce(tensor)
        assert tensor.item() == 6

The function runs in ``size`` processes at once, each on an event loop of its own, with ``comm`` a new comm of them all.
Processes are kept between tests (see ``pool.py``). All other arguments (parametrised values, fixtures such as
``tmp_path``) are made in pytest's own process and pickled over. A test without ``comm`` makes its own: the environment
is set as a launcher would.

Marker: ``ranks(size, *, backend="auto", device="cpu", timeout=60, hints=None)``. ``size`` and ``backend`` may be lists;
the test is then parametrised over them.
"""

from __future__ import annotations

import inspect
import itertools
import pickle
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from asynccomm.testing.messages import Died, Failed, Job, Passed, Report, Setup, Skipped, Stuck, World

if TYPE_CHECKING:
    from asynccomm.testing.pool import RankPool

DEFAULT_TIMEOUT = 60.0  # seconds for one test, processes' start not included

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
    """The comm of a test marked ``ranks``; it exists in the rank processes only."""
    if request.node.get_closest_marker("ranks") is None:
        raise pytest.UsageError(f"{request.node.nodeid} uses the fixture `comm` without @pytest.mark.ranks(size)")


@pytest.fixture
def _asynccomm_world(request: pytest.FixtureRequest) -> World:
    world = request.param
    assert isinstance(world, World)
    return world


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    worlds, ids = _worlds(marker)
    metafunc.fixturenames.append("_asynccomm_world")
    metafunc.parametrize("_asynccomm_world", worlds, ids=ids, indirect=True)


def _worlds(marker: pytest.Mark) -> tuple[list[World], list[str]]:
    """All combinations that the marker asks for, and how to call them in test ids."""
    try:
        sizes, options = _arguments(*marker.args, **marker.kwargs)
    except TypeError as exc:
        raise pytest.UsageError(f"@pytest.mark.ranks: {exc}") from None
    backend = options["backend"]
    backends = [backend] if isinstance(backend, str) else list(backend)
    worlds, ids = [], []
    for size, name in itertools.product(sizes, backends):
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise pytest.UsageError(f"@pytest.mark.ranks: size must be a positive integer, got {size!r}")
        worlds.append(World(size, name, options["device"], float(options["timeout"]), dict(options["hints"] or {})))
        ids.append(f"{size}ranks" + (f"-{name}" if not isinstance(backend, str) else ""))
    return worlds, ids


def _arguments(
    size: int | Sequence[int],
    *,
    backend: str | Sequence[str] = "auto",
    device: str = "cpu",
    timeout: float = DEFAULT_TIMEOUT,
    hints: dict[str, str] | None = None,
) -> tuple[list[int], dict[str, Any]]:
    sizes = [size] if isinstance(size, int) else list(size)
    return sizes, {"backend": backend, "device": device, "timeout": timeout, "hints": hints}


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("ranks") is None:
        return None
    world = pyfuncitem.callspec.params["_asynccomm_world"]
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
        # imported late: it needs torch, which other pytest runs with this plugin installed need not wait for
        pool = import_module("asynccomm.testing.pool").RankPool(Setup(list(sys.path), str(config.invocation_params.dir), args))
        config.stash[_pool_key] = pool
    return pool


def _jobs(item: pytest.Function, world: World) -> list[Job]:
    function = getattr(item.cls or item.module, item.originalname)
    if not inspect.iscoroutinefunction(function):
        raise pytest.UsageError(f"{item.nodeid}: a test marked `ranks` must be an async function")
    names = [name for name in inspect.signature(function).parameters if name != "self"]
    arguments = {name: item.funcargs[name] for name in names if name != "comm"}
    prefix = f"{item.cls.__qualname__}." if item.cls is not None else ""
    store = _pool(item.config).store
    run = next(_run_numbers)
    filters = [*item.config.getini("filterwarnings"), *_marked_filters(item)]
    return [
        Job(
            path=str(item.path),
            qualname=prefix + item.originalname,
            arguments=_pickled(arguments),
            wants_comm="comm" in names,
            world=world,
            rank=rank,
            env=_environment(rank, world.size, store.host, store.port, run),
            warning_filters=filters,
        )
        for rank in range(world.size)
    ]


def _marked_filters(item: pytest.Item) -> list[str]:
    return [text for marker in item.iter_markers("filterwarnings") for text in marker.args]


def _pickled(arguments: dict[str, Any]) -> bytes:
    for name, value in arguments.items():
        try:
            pickle.dumps(value)
        except Exception as exc:
            raise pytest.UsageError(
                f"argument {name!r} cannot be sent to the rank processes: {exc}; make it inside of the test"
            ) from exc
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


def _raise(reports: Sequence[Report], world: World) -> None:
    """Pass, skip or fail as the ranks did."""
    if all(isinstance(report, Passed) for report in reports):
        return
    skipped = [report for report in reports if isinstance(report, Skipped)]
    if len(skipped) == len(reports):
        pytest.skip(skipped[0].reason)
    # the cause first: ranks that were only ended by another's failure come last
    order = sorted(range(len(reports)), key=lambda rank: _weight(reports[rank]))
    parts = [text for rank in order if (text := _describe(rank, reports[rank], world))]
    if skipped and len(parts) == len(skipped):
        parts.append(f"{len(skipped)} of {world.size} ranks skipped the test, the others passed it")
    pytest.fail("\n\n".join(parts), pytrace=False)


def _weight(report: Report) -> int:
    if isinstance(report, Failed):
        return 1 if report.aborted_by is None else 3
    return {Died: 0, Stuck: 2}.get(type(report), 4)


def _describe(rank: int, report: Report, world: World) -> str:
    match report:
        case Failed(summary, traceback, None):
            return f"rank {rank} of {world.size} failed: {summary}\n{traceback}"
        case Failed(_, traceback, by):
            return f"rank {rank} of {world.size} was waiting when rank {by} failed, here:\n{traceback}"
        case Died(how):
            return f"rank {rank} of {world.size} {how}"
        case Stuck(stacks):
            return f"rank {rank} of {world.size} was still waiting and had to be ended, here:\n{stacks}"
        case Skipped(reason):
            return f"rank {rank} of {world.size} skipped: {reason}"
        case _:
            return ""
