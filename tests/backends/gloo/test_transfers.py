"""Several of gloo's operations as one; with works that are completed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from asynccomm.backends.gloo.transfers import Transfer, run


class Bench:
    """Takes notes of what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.works: dict[str, Any] = {}
        self.failures: list[Exception] = []

    def transfer(self, name: str, *, done: bool = False) -> Transfer:
        future: Any = torch.futures.Future()
        self.works[name] = future
        if done:
            future.set_result(None)

        class Work:
            def get_future(self) -> Any:
                return future

        def start() -> Work:
            self.events.append(f"start {name}")
            return Work()

        def note(what: str) -> Any:
            return lambda: self.events.append(f"{what} {name}")

        return Transfer(start, note("finish"), note("fill"))

    def run(self, *lines: list[Transfer]) -> None:
        run(lines, lambda: self.events.append("settled"), self.failures.append)

    def complete(self, name: str) -> list[str]:
        self.events.clear()
        self.works[name].set_result(None)
        return self.events

    def fail(self, name: str) -> list[str]:
        self.events.clear()
        self.works[name].set_exception(RuntimeError(name))
        return self.events


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_only_the_first_is_filled_in_the_call(bench: Bench) -> None:
    bench.run([bench.transfer("a"), bench.transfer("b"), bench.transfer("c")])
    assert bench.events == ["fill a", "start a", "start b", "start c"]
    assert bench.complete("a") == ["finish a", "fill b"]
    assert bench.complete("b") == ["finish b", "fill c"]
    assert bench.complete("c") == ["finish c", "settled"]


def test_lines_do_not_wait_for_each_other(bench: Bench) -> None:
    bench.run([bench.transfer("a"), bench.transfer("b")], [bench.transfer("x")])
    assert bench.events == ["fill a", "start a", "start b", "fill x", "start x"]
    assert bench.complete("x") == ["finish x"]
    assert bench.complete("a") == ["finish a", "fill b"]
    assert bench.complete("b") == ["finish b", "settled"]


def test_one_that_is_done_at_once_is_finished_before_the_next_starts(bench: Bench) -> None:
    bench.run([bench.transfer("a", done=True), bench.transfer("b", done=True)])
    assert bench.events == ["fill a", "start a", "finish a", "fill b", "start b", "finish b", "settled"]


def test_the_first_failure_is_told_at_once_and_nothing_is_settled(bench: Bench) -> None:
    bench.run([bench.transfer("a"), bench.transfer("b"), bench.transfer("c")])
    assert bench.fail("a") == []
    assert [str(failure) for failure in bench.failures] == ["a"]
    assert bench.fail("b") == []
    assert bench.complete("c") == ["finish c"]
    assert len(bench.failures) == 1


def test_what_goes_wrong_afterwards_is_a_failure(bench: Bench) -> None:
    def broken() -> None:
        raise ValueError("no")

    bench.run([bench.transfer("a")._replace(finish=broken)], [bench.transfer("b")])
    bench.complete("a")
    bench.complete("b")
    assert [str(failure) for failure in bench.failures] == ["no"]
    assert "settled" not in bench.events


def test_nothing_before_or_after(bench: Bench) -> None:
    bench.run([bench.transfer("a")._replace(fill=None, finish=None), bench.transfer("b")._replace(fill=None)])
    assert bench.events == ["start a", "start b"]
    assert bench.complete("a") == []
    assert bench.complete("b") == ["finish b", "settled"]
