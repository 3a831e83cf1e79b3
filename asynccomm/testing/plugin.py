"""pytest plugin: run a test on real rank processes.

::

    @pytest.mark.ranks(4)
    async def test_sum(comm):
        tensor = torch.tensor([float(comm.rank)])
        await comm.all_reduce(tensor)
        assert tensor.item() == 6

The function runs in ``size`` processes at once, each with its own event loop; ``comm`` is a new comm of all these
ranks. Processes are kept between tests (see ``pool.py``), and set back after each (``isolation.py``). Fixtures made by
``rank_fixture`` run in the ranks, too. All other arguments (parametrised values, fixtures such as ``tmp_path``) are
made in pytest's own process and pickled (``sending.py``). A test without ``comm`` makes its own comms: the environment
variables are set as by a launcher.

Marker: ``ranks(size, *, backend="auto", device="cpu", timeout=60, hints=None)``. ``size`` and ``backend`` may be lists;
the test is then parametrised over them.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

import pytest

from asynccomm.testing.debugging import DebuggerTerminal, leave_to_ranks
from asynccomm.testing.fixtures import ADVICE, RankOnly, only_in_ranks
from asynccomm.testing.measuring import coverage_settings
from asynccomm.testing.outcome import raise_outcome
from asynccomm.testing.protocol import Preparation, RankWorld, Setup
from asynccomm.testing.sending import WORLD, check_function, filters_of, surroundings, tasks_of

if TYPE_CHECKING:
    from asynccomm.testing.pool import RankPool

DEFAULT_TIMEOUT = 60.0  # seconds for one test, without the start of processes

COMM = RankOnly("comm", is_method=False)

_pool_key = pytest.StashKey["RankPool"]()
_setup_key = pytest.StashKey[Setup]()
_run_numbers = itertools.count()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("asynccomm").addoption(
        "--ranks-seed",
        type=int,
        default=None,
        help="seed of the random number generators in the rank processes, for every test (default: that of "
        "pytest-randomly, or else 0)",
    )


def pytest_configure(config: pytest.Config) -> None:
    # the last plugin to be registered is asked first: anyio's would run a test with its marker in this process
    config.pluginmanager.register(_Calls(), "asynccomm-calls")
    config.addinivalue_line(
        "markers",
        "ranks(size, *, backend='auto', device='cpu', timeout=60, hints=None): run the async test on `size` processes, "
        "with a `comm` of them all; size and backend may be lists",
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Note the state of this process before any test changes it."""
    config = session.config
    args = [f"--rootdir={config.rootpath}", f"--import-mode={config.getoption('importmode')}", "-Wignore"]
    if config.getoption("runxfail"):
        args += ["--runxfail"]
    args += ["-o", "addopts="]  # they may be options of the plugins that follow, which are for this process
    plugins = [*config.getoption("plugins"), "no:cov", "no:randomly", "no:xdist"]
    args += [f"-p{name}" for name in dict.fromkeys(plugins) if name not in ("cov", "randomly", "xdist")]
    if config.inipath is not None:
        args += ["-c", str(config.inipath)]
    environ = {name: value for name, value in os.environ.items() if name != "PYTEST_ADDOPTS"}
    config.stash[_setup_key] = Setup(
        list(sys.path), str(config.invocation_params.dir), args, environ, coverage_settings(), _seed(config)
    )
    if config.getoption("usepdb"):
        leave_to_ranks(config)


def pytest_unconfigure(config: pytest.Config) -> None:
    pool = config.stash.get(_pool_key, None)
    if pool is not None:
        pool.close()


@pytest.fixture
def comm() -> RankOnly:
    """The comm of a test marked ``ranks``. It exists in the rank processes only."""
    return COMM


@pytest.hookimpl(tryfirst=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest) -> None:
    """Refuse ordinary fixtures that depend on values of the ranks."""
    if getattr(fixturedef.func, "runs_in_ranks", False):
        return
    for name in fixturedef.argnames:
        if name != "request" and isinstance(request.getfixturevalue(name), RankOnly):
            pytest.fail(
                f"fixture {fixturedef.argname!r} runs in pytest's own process, but {only_in_ranks(name)}; {ADVICE}",
                pytrace=False,
            )


@pytest.fixture(name=WORLD)
def _world_parameter(request: pytest.FixtureRequest) -> RankWorld:
    world = request.param
    assert isinstance(world, RankWorld)
    return world


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    worlds, ids = _worlds(marker)
    metafunc.fixturenames.append(WORLD)
    metafunc.parametrize(WORLD, worlds, ids=ids, indirect=True)


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


@pytest.hookimpl(trylast=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start the rank processes, and have them import the test's file, which is no part of the test's own time."""
    if isinstance(item, pytest.Function) and item.get_closest_marker("ranks") is not None:
        check_function(item)
        preparation = Preparation(str(item.path), surroundings(), filters_of(item), _seed(item.config))
        _pool(item.config).prepare(preparation, _world(item).size)


class _Calls:
    """The hook that calls test functions."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        return _call(pyfuncitem)


def _call(pyfuncitem: pytest.Function) -> bool | None:
    if pyfuncitem.get_closest_marker("ranks") is None:
        for name in pyfuncitem._fixtureinfo.argnames:
            if isinstance(pyfuncitem.funcargs[name], RankOnly):
                pytest.fail(
                    f"{pyfuncitem.nodeid} uses the fixture `{name}` without @pytest.mark.ranks(size)", pytrace=False
                )
        return None
    other: Any = pyfuncitem.funcargs.get("anyio_backend", "asyncio")
    if (other if isinstance(other, str) else other[0]) != "asyncio":
        pytest.skip(f"ranks run on asyncio, and not on {other!r}")
    config, world, seed = pyfuncitem.config, _world(pyfuncitem), _seed(pyfuncitem.config)
    pool = _pool(config)
    tasks = tasks_of(pyfuncitem, world, pool.store, next(_run_numbers), seed, debug=config.getoption("usepdb"))
    reports, output = pool.run(tasks, world.timeout)
    for rank, text in enumerate(output):
        if text:
            pyfuncitem.add_report_section("call", f"rank {rank} output", text)
    raise_outcome(reports, world, f"the ranks' random number generators were seeded by {seed} (--ranks-seed={seed})")
    return True


def _world(item: pytest.Function) -> RankWorld:
    world = item.callspec.params[WORLD]
    assert isinstance(world, RankWorld)
    # a debugger waits for its user
    return world._replace(timeout=math.inf) if item.config.getoption("usepdb") else world


def _seed(config: pytest.Config) -> int:
    seed = config.getoption("--ranks-seed")
    if seed is None and config.pluginmanager.hasplugin("randomly"):
        seed = config.getoption("randomly_seed", None)
    return seed if isinstance(seed, int) else 0


def _pool(config: pytest.Config) -> RankPool:
    pool = config.stash.get(_pool_key, None)
    if pool is None:
        # imported late: it imports torch, and pytest runs without such tests should not wait for that
        pool = import_module("asynccomm.testing.pool").RankPool(
            config.stash[_setup_key], DebuggerTerminal(config), live=config.getoption("capture") == "no"
        )
        config.stash[_pool_key] = pool
    return pool
