"""Tests as messages to the ranks: their arguments, and the state of pytest's process."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pytest
from _pytest.fixtures import getfixturemarker
from _pytest.unittest import TestCaseFunction

from asynccomm.testing.fixtures import ADVICE, PATCHES, RankOnly, SendingError, pack
from asynccomm.testing.protocol import Filters, RankTask, RankWorld, Surroundings

if TYPE_CHECKING:
    from asynccomm.store.server import StoreServer

__all__ = ["WORLD", "check_function", "filters_of", "surroundings", "tasks_of"]

# fixtures of pytest that would do nothing in a rank, or nothing right
_ELSEWHERE: Final = {
    **dict.fromkeys(
        ("capsys", "capsysbinary", "capfd", "capfdbinary", "capteesys"),
        "the output of ranks goes to the test's report, or to the terminal with -s",
    ),
    "caplog": "use unittest's assertLogs or a logging.Handler of your own in the test",
    "recwarn": "use pytest.warns or warnings.catch_warnings in the test",
    **dict.fromkeys(("request", "pytestconfig"), "send the values that you need by a fixture of your own"),
    **dict.fromkeys(
        ("record_property", "record_testsuite_property", "record_xml_attribute", "cache"),
        "use it in an ordinary fixture of the test",
    ),
    **dict.fromkeys(
        ("tmp_path_factory", "tmpdir_factory"), "use tmp_path, or make the directory in an ordinary fixture of the test"
    ),
    "subtests": "use pytest.mark.parametrize",
    **dict.fromkeys(("pytester", "testdir"), "use it in a test without the marker `ranks`"),
}

WORLD: Final = "_asynccomm_world"  # the parameter that the marker `ranks` makes

_MODULE_SETUP: Final = ("setup_module", "teardown_module", "setUpModule", "tearDownModule")
_FUNCTION_SETUP: Final = ("setup_function", "teardown_function")
_CLASS_SETUP: Final = ("setup_class", "teardown_class", "setup_method", "teardown_method")


def check_function(item: pytest.Function) -> None:
    """Refuse test functions that cannot run in ranks, or not with their setup, after that setup."""
    if isinstance(item, TestCaseFunction):
        pytest.fail(f"{item.nodeid}: a method of a unittest.TestCase cannot be marked `ranks`", pytrace=False)
    parameters = getattr(item, "callspec", None)
    if parameters is None or WORLD not in parameters.params or any(mark.name == "ranks" for mark in parameters.marks):
        pytest.fail(
            f"{item.nodeid}: the marker `ranks` must be on the function, its class or its module (pytestmark), not on "
            f"a parameter, and not added by a hook, since pytest makes a test for each size",
            pytrace=False,
        )
    own = (item.module, _FUNCTION_SETUP) if item.cls is None else (item.cls, _CLASS_SETUP)
    places = [(item.module, _MODULE_SETUP), own]
    methods = [(name, getattr(place, name, None)) for place, names in places for name in names]
    if found := [name for name, method in methods if method is not None and getfixturemarker(method) is None]:
        pytest.fail(
            f"{item.nodeid}: {found[0]}() runs in pytest's own process, and not in the ranks; in place of it, {ADVICE}",
            pytrace=False,
        )
    if item.cls is not None and (attributes := getattr(item.instance, "__dict__", None)):
        pytest.fail(
            f"{item.nodeid}: a fixture has set self.{next(iter(attributes))} in pytest's own process, and not in the "
            f"ranks; {ADVICE}",
            pytrace=False,
        )
    function = getattr(item.cls or item.module, item.originalname)
    if inspect.isasyncgenfunction(function):
        pytest.fail(f"{item.nodeid}: a test marked `ranks` must not yield", pytrace=False)
    if not inspect.iscoroutinefunction(function):
        pytest.fail(f"{item.nodeid}: a test marked `ranks` must be an async function", pytrace=False)


def filters_of(item: pytest.Item) -> Filters:
    """The warning filters of a test."""
    return Filters(
        ini=item.config.getini("filterwarnings"),
        command_line=item.config.known_args_namespace.pythonwarnings or [],
        markers=[text for marker in item.iter_markers("filterwarnings") for text in marker.args],
    )


def surroundings() -> Surroundings:
    """The state of this process now."""
    torch = sys.modules.get("torch")
    now = Surroundings(dict(os.environ), _cwd(), list(sys.path))
    if torch is not None:
        device = str(torch.get_default_device())
        now = now._replace(dtype=str(torch.get_default_dtype()), device=None if device == "cpu" else device)
    return now


def _cwd() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        message = "the current directory of pytest's process does not exist, so the ranks cannot change to it"
        raise pytest.fail.Exception(message, pytrace=False) from None


def tasks_of(
    item: pytest.Function, world: RankWorld, store: StoreServer, run: int, seed: int, *, debug: bool
) -> list[RankTask]:
    """The tasks of all ranks. Fails the test if an argument cannot be sent.

    Args:
        store: for the ranks' rendezvous.
        run: a number that no other test has, for the rendezvous.
    """
    function = getattr(item.cls or item.module, item.originalname)
    names = [name for name in inspect.signature(function).parameters if name in item.funcargs]
    try:
        arguments = pack(_to_send(item, names))
    except SendingError as exc:
        raise _failure(item, exc) from None
    prefix = f"{item.cls.__qualname__}." if item.cls is not None else ""
    return [
        RankTask(
            path=str(item.path),
            qualname=prefix + item.originalname,
            arguments=arguments,
            names=names,
            wants_comm=any(map(_needs_comm, item.funcargs.values())),
            world=world,
            rank=rank,
            env=_launcher_variables(rank, world.size, store.host, store.port, run),
            filters=filters_of(item),
            surroundings=surroundings(),
            seed=seed,
            debug=debug,
        )
        for rank in range(world.size)
    ]


def _to_send(item: pytest.Function, names: Sequence[str]) -> dict[str, Any]:
    """The values for the ranks by name: rank fixtures, the test's arguments, and all that these depend on."""
    found: dict[str, Any] = {}

    def add_ordinary(arguments: Mapping[str, Any]) -> None:
        """Add the values of ordinary fixtures that a rank fixture depends on, so that errors have their names."""
        for name, value in arguments.items():
            if isinstance(value, RankOnly):
                add_ordinary(value.arguments)
            else:
                found.setdefault(name, value)

    for name, value in item.funcargs.items():
        if isinstance(value, RankOnly):
            add_ordinary(value.arguments)
        if name in names or isinstance(value, RankOnly):
            found[name] = PATCHES if isinstance(value, pytest.MonkeyPatch) else value
    for name, value in found.items():
        _check(name, value)
    return found


def _check(name: str, value: Any) -> None:
    """Refuse values that could be pickled, and would be of no use in a rank."""
    # a fixture of the project may have such a name, too
    if name in _ELSEWHERE and getattr(value, "__module__", "").startswith("_pytest."):
        raise SendingError(name, f"pytest's {name!r} works in pytest's own process only", _ELSEWHERE[name])
    if inspect.isawaitable(value) or inspect.isasyncgen(value):
        close = getattr(value, "close", None)
        if close is not None:
            close()  # else Python warns that it was never awaited
        raise SendingError(name, "it is asynchronous, and no plugin of pytest has run it", ADVICE)


def _needs_comm(value: Any) -> bool:
    if not isinstance(value, RankOnly):
        return False
    if value.function is None:
        return value.name == "comm"
    return any(_needs_comm(each) for each in value.arguments.values())


def _failure(item: pytest.Function, error: SendingError) -> BaseException:
    if error.advice:
        kind, advice = "fixture", error.advice
    else:
        # pytest itself makes a fixture of each parameter
        own = all(each.func.__module__.startswith("_pytest") for each in _definitions(item, error.name))
        kind, advice = ("parameter", "make") if own else ("fixture", f"{ADVICE}, or make")
        advice += " the value in the test"
    text = f"{kind} {error.name!r} cannot be sent to the ranks: {error.reason}; {advice}"
    return pytest.fail.Exception(text, pytrace=False)


def _definitions(item: pytest.Function, name: str) -> Sequence[pytest.FixtureDef[Any]]:
    return item._fixtureinfo.name2fixturedefs.get(name, ())


def _launcher_variables(rank: int, size: int, host: str, port: int, run: int) -> dict[str, str]:
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
