"""Where a call came from."""

from __future__ import annotations

import concurrent.futures.thread
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from types import CodeType
from typing import Any

import pytest
import torch
import typing_extensions

import asynccomm
from asynccomm import Comm, ReduceOp
from asynccomm.core import callsite
from asynccomm.core.callsite import CallSite, call_site, show
from asynccomm.testing.local import loopback_world

PACKAGE = Path(asynccomm.__file__).parent


def run_as(path: Path | str, source: str, **names: Any) -> dict[str, Any]:
    exec(compile(source, str(path), "exec"), names)
    return names


def here(line: int, function: str) -> str:
    return f"{__file__}:{line} in {function}"


def line() -> int:
    return sys._getframe(1).f_lineno


def test_the_place_of_the_call() -> None:
    assert show(call_site()) == here(line(), "test_the_place_of_the_call")


def test_the_line_within_a_call_of_many_lines() -> None:
    start = line()
    found = [
        None,
        call_site(),
    ]
    assert show(found[1]) == here(start + 3, "test_the_line_within_a_call_of_many_lines")


def test_the_package_itself_is_skipped() -> None:
    inner = run_as(PACKAGE / "inner.py", "def outer(get):\n    return get()\n")["outer"]
    assert show(inner(call_site)) == here(line(), "test_the_package_itself_is_skipped")


def test_torch_between_the_user_and_the_call_is_skipped() -> None:
    sites: list[CallSite | None] = []
    weight = torch.ones(2, requires_grad=True)
    weight.register_post_accumulate_grad_hook(
        run_as(PACKAGE / "hook.py", "def hook(_):\n    take(site())\n", take=sites.append, site=call_site)["hook"]
    )
    weight.sum().backward()
    assert [show(site) for site in sites] == [here(line() - 1, "test_torch_between_the_user_and_the_call_is_skipped")]


def test_the_standard_library_between_them_is_skipped() -> None:
    sites: list[CallSite | None] = []
    scope = run_as(
        PACKAGE / "scope.py",
        "@contextmanager\ndef scope():\n    yield\n    take(site())\n",
        contextmanager=contextmanager,
        take=sites.append,
        site=call_site,
    )["scope"]
    start = line()
    with scope():
        pass
    assert [show(site) for site in sites] == [here(start + 1, "test_the_standard_library_between_them_is_skipped")]


def test_a_wrapper_of_typing_extensions_is_skipped() -> None:
    function = run_as(PACKAGE / "old.py", "def function(get):\n    return get()\n")["function"]
    with pytest.warns(DeprecationWarning, match="old"):
        found = typing_extensions.deprecated("old")(function)(call_site)
    assert show(found) == here(line() - 1, "test_a_wrapper_of_typing_extensions_is_skipped")


@pytest.mark.parametrize(
    "name",
    [
        "<stdin>",
        "<string>",
        "<ipython-input-1-0a1b>",
        "/program.zip/x.py",
        f"{Path(os.__file__).parent}/site-packages/x.py",
        f"{Path(os.__file__).parent}/dist-packages/x.py",
    ],
)
def test_a_users_program_lies_anywhere(name: str) -> None:
    outer = run_as(name, "def outer(get):\n    return get()\n")["outer"]
    assert show(outer(call_site)) == f"{name}:2 in outer"


def test_a_library_is_the_place_where_it_runs_without_a_user() -> None:
    path = Path(torch.__file__).parent / "inner.py"
    outer = run_as(path, "def outer(get, put):\n    put(get())\n")["outer"]
    sites: SimpleQueue[CallSite | None] = SimpleQueue()
    Thread(target=outer, args=(call_site, sites.put)).start()
    assert show(sites.get(timeout=10)) == f"{path}:2 in outer"
    with ThreadPoolExecutor(1) as pool:
        assert show(pool.submit(call_site).result(10)).startswith(f"{concurrent.futures.thread.__file__}:")


@pytest.mark.parametrize("folder", ["testing/conformance", "benchmarks"])
def test_the_packages_tests_and_benchmarks_are_users(folder: str) -> None:
    path = PACKAGE / folder / "x.py"
    outer = run_as(path, "def outer(get):\n    return get()\n")["outer"]
    assert show(outer(call_site)) == f"{path}:2 in outer"


def test_a_package_beside_it_is_not_it() -> None:
    path = f"{PACKAGE}_more/x.py"
    outer = run_as(path, "def outer(get):\n    return get()\n")["outer"]
    assert show(outer(call_site)) == f"{path}:2 in outer"


def test_nobody_has_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callsite, "user_files", set())
    monkeypatch.setattr(callsite, "_is_ours", lambda name: True)
    assert call_site() is None
    assert show(None) == ""


def test_an_instruction_that_has_no_line() -> None:
    code: CodeType = test_nobody_has_called.__code__
    unknown: CallSite = (code, 10**6)
    assert show(unknown) == f"{__file__}:{code.co_firstlineno} in test_nobody_has_called"


async def test_every_operation_has_one() -> None:
    async with loopback_world(2) as (a, b):
        first = line() + 1
        works = [a.all_reduce(torch.ones(1)), b.all_reduce(torch.ones(1))]
        with a.coalesce(), b.coalesce():
            works += [comm.all_reduce(torch.ones(2)) for comm in (a, b)]
        works += [comm.all_reduce_coalesced([torch.ones(2)], ReduceOp.SUM) for comm in (a, b)]
        works += [a.send(torch.ones(1), 1), b.recv(torch.ones(1), 0)]
        for work in works:
            await work
        lines = [show(work.site).partition(" ")[0] for work in works]
        assert lines == [f"{__file__}:{first + offset}" for offset in (0, 0, 2, 2, 3, 3, 4, 4)]


async def test_where_a_helper_of_the_users_calls() -> None:
    def helper(comm: Comm) -> asynccomm.Work[Any]:
        return comm.barrier()

    async with loopback_world(1) as (comm,):
        work = helper(comm)
        await work
        assert " in helper" in show(work.site)


async def test_nobody_asks_without_a_channel() -> None:
    async with loopback_world(1, hints={"control": "off"}) as (comm,):
        work = comm.barrier()
        await work
        assert work.site is None


def test_texts_are_kept_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(callsite, "_shown", {})
    monkeypatch.setattr(callsite, "SHOWN", 2)
    codes = [compile("f()", f"made{number}.py", "exec") for number in range(3)]
    for _ in range(2):
        assert [show((code, 0)).split(":")[0] for code in codes] == ["made0.py", "made1.py", "made2.py"]
        assert len(callsite._shown) <= 2
    assert show((codes[2], 0)) is show((codes[2], 0))
