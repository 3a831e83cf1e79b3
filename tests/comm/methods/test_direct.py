"""Methods whose calls begin in C: the same calls, errors, sites and texts as of their functions."""

from __future__ import annotations

import gc
import inspect
import pydoc
import re
import sys
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch

from asynccomm import Comm, Work, ops
from asynccomm.comm.methods.collectives import Collectives
from asynccomm.comm.methods.direct import direct
from asynccomm.core.callsite import show
from asynccomm.core.native import CoreUnavailable, load
from tests.backends.shm.paths import counted

_work = load("asynccomm.core._work")
in_c = pytest.mark.skipif(isinstance(_work, CoreUnavailable), reason="the modules in C were not built")


def test_a_method_that_is_looked_up_is_its_function() -> None:
    function = Comm.all_reduce
    assert inspect.isfunction(function)
    assert str(inspect.signature(function)).startswith("(self, tensor: 'Tensor', op: 'ReduceOpLike' = ")
    assert "elementwise" in (inspect.getdoc(function) or "")
    text = re.sub(r"\n \| *", " ", pydoc.plain(pydoc.render_doc(Comm)))  # Python 3.13 breaks the lines of signatures
    assert re.search(r"all_reduce\( *self, +tensor: 'Tensor'", text)
    assert "Combine all ranks' ``tensor`` elementwise" in text


@in_c
def test_a_method_that_is_looked_up_statically_looks_like_its_function() -> None:
    method = vars(Collectives)["all_reduce"]
    assert isinstance(method, FunctionType)
    assert method.__code__ is Comm.all_reduce.__code__
    assert method.__doc__ == Comm.all_reduce.__doc__
    assert weakref.ref(method)() is method
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        method.nothing  # noqa: B018
    imitated = mock.create_autospec(Comm, instance=True)
    imitated.all_reduce(torch.ones(1))
    imitated.barrier()
    with pytest.raises(TypeError, match="tensor"):
        imitated.all_reduce()


@in_c
@pytest.mark.exhaustive  # the import of the compiler takes seconds
@pytest.mark.filterwarnings("ignore:Dynamo does not know")
@pytest.mark.ranks(1)
async def test_a_compiled_function_may_call_it(comm: Comm) -> None:
    def function(x: torch.Tensor, *, by_name: bool) -> tuple[torch.Tensor, Work[Any], Work[Any]]:
        y = x + 1
        return y, comm.all_reduce(tensor=y) if by_name else comm.all_reduce(y), comm.barrier()

    compiled = torch.compile(function, backend="eager")
    for by_name in (False, True, False):
        y, reduced, barrier = compiled(torch.ones(3), by_name=by_name)
        assert await reduced is y
        await barrier
        assert show(reduced.site).endswith(" in function")


@in_c
def test_names_that_are_no_arguments_are_refused() -> None:
    def method(self: Any, tensor: Any, root: int, *, timeout: Any = None) -> None: ...

    with pytest.raises(AssertionError, match="no arguments of"):
        direct(ops.Broadcast.of, "root", "tensor")(method)


@in_c
@pytest.mark.parametrize(
    "arguments",
    [
        (1, len, (), 0, 0),  # without __get__
        (len, len, (), 0, 0),
        (pydoc.plain, len, (), -1, 0),
        (pydoc.plain, len, (), 2, 1),
        (pydoc.plain, len, (None,), 1, 3),
        (pydoc.plain, len, (None,) * 8, 0, 0),
    ],
)
def test_a_method_that_cannot_be(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(ValueError, match="no method of"):
        _work.DirectMethod(*arguments)


@in_c
def test_objects_without_a_path_have_the_function() -> None:
    class Own:
        @direct(ops.Broadcast.of, "tensor", "root")
        def broadcast(self, tensor: str, root: int = 7, *, timeout: Any = None) -> tuple[Any, ...]:
            return self, tensor, root, timeout

    own = Own()
    assert type(vars(Own)["broadcast"]) is _work.DirectMethod
    assert own.broadcast("x") == (own, "x", 7, None)
    assert own.broadcast("x", 3, timeout=2) == (own, "x", 3, 2)
    assert own.broadcast(tensor="x") == (own, "x", 7, None)
    assert Own.broadcast(own, "x") == own.broadcast.__func__(own, "x") == (own, "x", 7, None)  # type: ignore[attr-defined]
    own._fast = None  # type: ignore[attr-defined]
    assert own.broadcast("x") == (own, "x", 7, None)
    for wrong in ((), (1, 2, 3)):
        with pytest.raises(TypeError, match="broadcast"):
            own.broadcast(*wrong)
    with pytest.raises(TypeError, match="unexpected keyword argument 'wrong'"):
        own.broadcast("x", wrong=1)  # type: ignore[call-arg]
    gone = weakref.ref(Own)
    del Own, own
    gc.collect()
    assert gone() is None


def functions_of(call: Callable[[], object]) -> list[str]:
    """The names of the Python functions that run in a call, but for ``call``."""
    names: list[str] = []
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names[1:]


@in_c
@pytest.mark.ranks(1)  # with more, a rank that is late has the call take the ordinary path
async def test_calls_begin_in_c() -> None:
    async with counted() as (comm, paths):
        tensor, out = torch.ones(3), torch.zeros(3)
        for _ in range(2):
            await comm.all_reduce(tensor, out=out)
            await comm.broadcast(tensor, 0)
            await comm.barrier()
        paths.took()
        works: list[Work[Any]] = []
        assert functions_of(lambda: works.append(comm.broadcast(tensor, 0))) == []
        assert show(works[0].site).endswith(" in <lambda>")
        await works[0]
        work = comm.broadcast(tensor, 0)
        assert show(work.site).endswith(" in test_calls_begin_in_c")
        await work
        await comm.barrier()
        await comm.broadcast(tensor, root=0)
        await comm.all_reduce(tensor, out=out)
        bound = comm.broadcast
        await bound(tensor, 0)
        assert paths.took() == "fast"
        assert out.tolist() == [1.0] * 3
        with pytest.raises(TypeError, match="root"):
            comm.broadcast(tensor)  # type: ignore[call-arg]
        with pytest.raises(ValueError, match="root"):
            comm.broadcast(tensor, 5)
        assert paths.took() == "ordinary"


@pytest.mark.ranks(2)
async def test_a_subclass_may_have_a_method_of_its_own() -> None:
    class Own(Comm):
        def barrier(self, *args: Any, **options: Any) -> Any:
            calls.append(options)
            return super().barrier(*args, **options)

    calls: list[dict[str, Any]] = []
    async with counted() as (comm, _):
        comm.__class__ = Own
        await comm.barrier()
        await comm.barrier(timeout=10)
        assert calls == [{}, {"timeout": 10}]


@pytest.mark.ranks(2)
async def test_a_list_is_worth_a_recipe_when_it_comes_twice() -> None:
    async with counted() as (comm, paths):
        for path in ("ordinary", "fast", "fast"):  # refused in C at first, it is not counted again behind the method
            await comm.all_gather([torch.empty(2), torch.empty(2)], torch.ones(2))
            assert paths.took() == path or isinstance(_work, CoreUnavailable)
