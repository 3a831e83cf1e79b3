"""Fixtures that run in the ranks: the decorator, and the values that stand for them in pytest's own process.

pytest resolves names, parameters and overrides of fixtures in its own process. There a rank fixture has a stand-in as
its value, which holds the stand-ins and values of the fixtures that it depends on. The stand-ins are pickled with the
test's arguments, and each rank puts the real values in their place (``rank_values.py``).
"""

from __future__ import annotations

import inspect
import io
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple, TypeVar, cast, final, overload

import pytest

from asynccomm.errors import describe_exception

__all__ = ["FunctionKey", "RankOnly", "RankRequest", "SendingError", "pack", "rank_fixture", "registered", "unpack"]

F = TypeVar("F", bound=Callable[..., Any])


class SendingError(ValueError):
    """A value cannot be sent to the ranks.

    Args:
        name: the fixture or parameter.
        advice: a way that works; empty: the usual one.
    """

    def __init__(self, name: str, reason: str, advice: str = "") -> None:
        super().__init__(name, reason, advice)
        self.name, self.reason, self.advice = name, reason, advice


class FunctionKey(NamedTuple):
    """The place of a function, by which another process that imports the same files finds it.

    A factory makes several functions in one place, also for several modules, of which a process may import only some.
    """

    file: str
    line: int
    qualname: str
    module: str  #: the module in the import of which the function was made
    module_file: str
    number: int  #: of the functions that this module has made in the place


class RankRequest(NamedTuple):
    """The argument ``request`` of a rank fixture."""

    fixturename: str
    nodeid: str  #: of the test
    param: Any  #: the fixture's parameter; None without parameters


@final
class RankOnly:
    """Stands in pytest's own process for a value that exists in the ranks only.

    Args:
        name: the fixture.
        function: the place of the function that makes the value; None: the rank process has the value.
        arguments: the values of the fixtures that the function depends on, which may be stand-ins themselves.
        is_method: the function's first argument is the instance of the test's class.
    """

    def __init__(
        self,
        name: str,
        function: FunctionKey | None = None,
        arguments: dict[str, Any] | None = None,
        *,
        is_method: bool,
    ) -> None:
        self.name = name
        self.function = function
        self.arguments = {} if arguments is None else arguments
        self.is_method = is_method

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # of pickle and copy
            raise AttributeError(attribute)
        raise AttributeError(f"{only_in_ranks(self.name)}, so {attribute!r} cannot be read here; {ADVICE}")


ADVICE = "decorate the fixture with asynccomm.testing.rank_fixture, and it runs in the ranks"

PATCHES = RankOnly("monkeypatch", is_method=False)  #: each rank has a MonkeyPatch of its own

_functions: dict[FunctionKey, Callable[..., Any]] = {}


def only_in_ranks(name: str) -> str:
    return f"the value of fixture {name!r} exists in the ranks only"


def registered(key: FunctionKey) -> Callable[..., Any]:
    """The function of a rank fixture in this process. Raises: LookupError if no imported module has it."""
    if key not in _functions:
        try:
            import_module(key.module)
        except ImportError as exc:
            raise LookupError(f"{_missing(key)}: {exc}") from exc
    if key not in _functions:
        raise LookupError(_missing(key))
    return _functions[key]


def _missing(key: FunctionKey) -> str:
    return (
        f"the ranks have not imported rank fixture {key.qualname!r} of {key.file}; define it in a conftest.py, in the "
        f"test's file, or in a module that one of these imports"
    )


@overload
def rank_fixture(function: F, /) -> F: ...


@overload
def rank_fixture(
    *,
    params: Iterable[object] | None = None,
    autouse: bool = False,
    ids: Sequence[object | None] | Callable[[Any], object | None] | None = None,
    name: str | None = None,
) -> Callable[[F], F]: ...


def rank_fixture(
    function: Callable[..., Any] | None = None,
    /,
    *,
    params: Iterable[object] | None = None,
    autouse: bool = False,
    ids: Sequence[object | None] | Callable[[Any], object | None] | None = None,
    name: str | None = None,
) -> Any:
    """Make a fixture that runs in the ranks of each test marked ``ranks``, instead of pytest's own process.

    ::

        @rank_fixture
        async def group(comm):
            async with comm.split(range(comm.size), "group") as group:
                yield group

    The function may be synchronous or ``async``, and a generator, the rest of which runs after the test. It may depend
    on ``comm``, on other rank fixtures, on ``monkeypatch``, and on ordinary fixtures with values that can be pickled,
    such as ``tmp_path``; ``request`` has ``param``, ``fixturename`` and ``nodeid``. It runs once per test and rank, in
    the event loop of the test; its time counts as the test's. After a failed test the comm is closed before the rest of
    a generator runs, and errors of operations on that comm are left out there.

    Args:
        params, autouse, ids, name: see ``pytest.fixture``. There is no ``scope``: a comm lives as long as one test.

    Raises: TypeError if ``function`` is not a function.
    """
    if function is None:
        return lambda made: rank_fixture_of(made, params, autouse, ids, name)
    return rank_fixture_of(function, params, autouse, ids, name)


def rank_fixture_of(function: Any, params: Any, autouse: bool, ids: Any, name: str | None) -> Any:
    """See ``rank_fixture``."""
    if not inspect.isfunction(function):
        raise TypeError(f"rank_fixture decorates functions, got {function!r}")
    key = _new_key(function)
    _functions[key] = function
    called = name or function.__name__

    def stand_in(*instance: Any, **arguments: Any) -> RankOnly:
        return RankOnly(
            called, key, {each: _sent(value) for each, value in arguments.items()}, is_method=bool(instance)
        )

    stand_in.__name__, stand_in.__qualname__ = function.__name__, function.__qualname__
    stand_in.__module__, stand_in.__doc__ = function.__module__, function.__doc__
    stand_in.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    stand_in.runs_in_ranks = True  # type: ignore[attr-defined]
    return pytest.fixture(params=params, autouse=autouse, ids=ids, name=name)(stand_in)


def _new_key(function: Any) -> FunctionKey:
    namespace = _namespace(function)
    code = function.__code__
    place = code.co_filename, code.co_firstlineno, function.__qualname__
    # kept in the module: an import that is tried again counts from the start
    numbers = namespace.setdefault("__asynccomm_rank_fixtures__", Counter())
    numbers[place] += 1
    module, file = namespace.get("__name__", function.__module__), namespace.get("__file__", "")
    return FunctionKey(*place, module, file, numbers[place])


def _namespace(function: Any) -> dict[str, Any]:
    """The namespace of the module that is being imported, which may not be the one with the function's code."""
    frame = sys._getframe()
    while frame.f_code.co_name != "<module>":
        if frame.f_back is None:
            return cast("dict[str, Any]", function.__globals__)
        frame = frame.f_back
    return frame.f_globals


def pack(values: Mapping[str, Any]) -> bytes:
    """Pickle values of fixtures and parameters, by name. Objects that several values share stay shared.

    Raises: SendingError for the first one that cannot be pickled.
    """
    file = io.BytesIO()
    pickler = pickle.Pickler(file, pickle.HIGHEST_PROTOCOL)
    pickler.dump(list(values))
    for name, value in values.items():
        try:
            pickler.dump(value)
        except Exception as exc:  # __reduce__ may raise any exception
            raise SendingError(name, str(exc)) from exc
    return file.getvalue()


def unpack(data: bytes) -> dict[str, Any]:
    """The values that ``pack`` has pickled. Raises: ValueError naming the one that cannot be unpickled here."""
    unpickler = pickle.Unpickler(io.BytesIO(data))
    values = {}
    for name in unpickler.load():
        try:
            values[name] = unpickler.load()
        except Exception as exc:
            raise ValueError(
                f"{name!r} was sent to the ranks, but cannot be unpickled there: {describe_exception(exc)}; {ADVICE}"
            ) from exc
    return values


def _sent(value: Any) -> Any:
    if isinstance(value, pytest.FixtureRequest):
        return RankRequest(value.fixturename or "", value.node.nodeid, getattr(value, "param", None))
    return PATCHES if isinstance(value, pytest.MonkeyPatch) else value
