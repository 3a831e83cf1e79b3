"""What holds for the process that pytest runs in."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests import ordering, rewriting, sampling, warm_python

rewriting.install()

# The same examples each time, and none of them fails because the machine is busy. For other ones, another time:
# pytest --hypothesis-profile=search
settings.register_profile(
    "usual", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], max_examples=sampling.LEAST
)
settings.register_profile("exhaustive", settings.get_profile("usual"), max_examples=100)
settings.register_profile("search", settings.get_profile("exhaustive"), derandomize=False)
settings.load_profile("usual")

# A shell's background jobs ignore Ctrl-C, and so would the processes that tests start to interrupt them.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# The tensors of tests are small, and a second thread of torch's would take turns with rank processes, waiting busily.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="try all cases, where tests usually try some")
    parser.addoption("--real-python", action="store_true", help="start Python as new interpreters: see warm_python.py")


def pytest_configure(config: pytest.Config) -> None:
    ordering.keep_order(config)
    sampling.be_exhaustive(config.getoption("--exhaustive"))
    if config.getoption("--exhaustive") and not config.getoption("--hypothesis-profile"):
        settings.load_profile("exhaustive")


def pytest_unconfigure() -> None:
    rewriting.remove()


@pytest.hookimpl(wrapper=True)
def pytest_sessionstart(session: pytest.Session) -> Iterator[None]:
    """The workers of xdist, which start here, are forks of a process with torch, too."""
    config = session.config
    if not config.pluginmanager.hasplugin("dsession") or config.getoption("--real-python") or sys.platform != "linux":
        return (yield)
    with warm_python.installed(workers=True):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    rewriting.rewrite_share(session.config)


@pytest.hookimpl(trylast=True)  # of what -k and -m select
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests for ``--exhaustive``, without the option; order the rest for xdist."""
    if not sampling.exhaustive():
        usual = [item for item in items if item.get_closest_marker("exhaustive") is None]
        by_name = any("[" in argument for argument in config.args)  # one combination of parameters
        chosen = set(usual) - set(() if by_name else sampling.left_out(usual))
        if len(chosen) < len(items):
            config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
            items[:] = [item for item in items if item in chosen]
    if hasattr(config, "workerinput"):  # of xdist
        ordering.sort(items)


class _Freezing:
    """What the tests of a file find is left out of their collections.

    To look at torch, thousands of tests and what other files have imported takes each of them half a second.
    """

    file: Path | None = None  # of which a test has begun


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Tests start Python by forks of a process with torch, but for those that are marked ``real_python``."""
    if item.path != _Freezing.file:
        _Freezing.file = item.path
        gc.collect()
        gc.freeze()
    real = item.config.getoption("--real-python") or item.get_closest_marker("real_python") is not None
    if real or sys.platform != "linux":
        return (yield)
    with warm_python.installed(finalize=item.get_closest_marker("real_end") is not None):
        return (yield)


@pytest.fixture(autouse=True)
def nobody_stays_on_a_control_channel(request: pytest.FixtureRequest) -> Iterator[None]:
    """One that is left open would fail other tests, which look whether anything is; so the one that left it has to."""
    if request.node.get_closest_marker("ranks") is not None:  # those have processes of their own
        yield
        return
    before = _channels()
    yield
    end = time.monotonic() + 10.0
    while _channels() - before and time.monotonic() < end:
        gc.collect()  # a test that fails half-way drops its comms
        time.sleep(0.01)
    left = _channels() - before
    assert not left, f"control channels are left open: {sorted(left)}"


def _channels() -> set[str]:
    """The names that control channels of this process listen at."""
    if all(thread.name != "asynccomm control" for thread in threading.enumerate()):
        return set()
    lines = Path("/proc/net/unix").read_text(errors="replace").splitlines()
    return {line.split()[-1] for line in lines if "@asynccomm/" in line and f"/{os.getpid()}/" in line}
