"""``--faults=N`` cases instead of the usual number, run a few at a time, and a table of them at the end."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, final

import pytest

from tests.sampling import exhaustive

from .jobs import Nursery
from .plans import COMBINATIONS, ISSUING, Case, plan
from .reports import Outcome
from .verdicts import delays, judge

USUAL: Final = len(COMBINATIONS)
SEED: Final = 11
WAITING: Final = {"stop", "block", "late"}  # cases that mostly wait for a deadline
BUSY_SLOTS: Final = 2  # cases at a time
WAITING_SLOTS: Final = 5

_results_key = pytest.StashKey["list[tuple[Case, Outcome]]"]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--faults", type=int, metavar="N", help=f"cases of faults to run (of {USUAL}, a sample)")
    parser.addoption("--faults-seed", type=int, default=SEED, metavar="S", help=f"draws other ones ({SEED})")


def cases_of(config: pytest.Config) -> list[Case]:
    """All cases that are asked for."""
    # the options are unknown if this file was not yet loaded when the command line was read
    seed, count = config.getoption("--faults-seed", SEED), config.getoption("--faults", None)
    cases = plan(seed, USUAL if count is None else count)
    return cases if exhaustive() or count is not None else _sample(cases)


def _sample(cases: Sequence[Case]) -> list[Case]:
    """As many as it takes for each fault to meet each backend, phase and detail, and for all operations."""
    missing = set().union(*map(_meetings, cases))
    sample: set[Case] = set()
    while missing:
        case = max(cases, key=lambda case: len(missing & _meetings(case)))
        sample.add(case)
        missing -= _meetings(case)
    return [case for case in cases if case in sample]


def _meetings(case: Case) -> set[tuple[str, ...]]:
    fault, backend, phase = case.fault, case.backend, case.phase
    return {
        ("fault on backend", fault, backend),
        ("fault at phase", fault, phase),
        ("fault in detail", fault, case.detail),
        ("backend at phase", backend, phase),
        ("operation", case.operation),
    }


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fault_case" in metafunc.fixturenames:
        cases = cases_of(metafunc.config)
        metafunc.parametrize("fault_case", cases, ids=[f"{case.number}-{case}" for case in cases])


@final
class Runner:
    """Runs the cases that were collected, a few at a time, in their order."""

    def __init__(self, cases: Sequence[Case]) -> None:
        self.cases = list(cases)
        self.results: list[tuple[Case, Outcome]] = []
        self._nursery = Nursery()
        self._busy = ThreadPoolExecutor(BUSY_SLOTS, "busy cases")
        self._waiting = ThreadPoolExecutor(WAITING_SLOTS, "waiting cases")
        self._futures: dict[Case, Future[Outcome]] = {}
        for case in self.cases:
            waits = case.fault in WAITING or case.detail in ("start", "meeting")
            pool = self._waiting if waits else self._busy
            self._futures[case] = pool.submit(self._nursery.run, case)

    def outcome(self, case: Case) -> Outcome:
        outcome = self._futures[case].result()
        self.results.append((case, outcome))
        return outcome

    def close(self) -> None:
        for pool in (self._busy, self._waiting):
            pool.shutdown(wait=True, cancel_futures=True)
        self._nursery.close()


@pytest.fixture(scope="session")
def fault_runner(request: pytest.FixtureRequest) -> Iterator[Runner]:
    items = request.session.items
    runner = Runner([item.callspec.params["fault_case"] for item in items if _has_case(item)])
    try:
        yield runner
    finally:
        request.config.stash[_results_key] = runner.results
        runner.close()


def _has_case(item: Any) -> bool:
    return "fault_case" in getattr(getattr(item, "callspec", None), "params", {})


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    results = config.stash.get(_results_key, [])
    if not results:
        return
    found: dict[tuple[str, str], list[tuple[Case, Outcome]]] = defaultdict(list)
    for case, outcome in results:
        found[case.fault, case.backend].append((case, outcome))
    wrong = sum(bool(judge(case, outcome)) for case, outcome in results)
    terminalreporter.section(f"{len(results)} faults, {wrong} of them went wrong")
    terminalreporter.line(f"{'fault':<12} {'backend':<9} {'cases':>6} {'known after: median':>20} {'most':>8}")
    for (fault, backend), some in sorted(found.items()):
        line = f"{fault:<12} {backend:<9} {len(some):>6}"
        if times := sorted(time for case, outcome in some if case.phase in ISSUING for time in delays(case, outcome)):
            line += f" {statistics.median(times):>18.3f} s {times[-1]:>6.3f} s"
        terminalreporter.line(line)
    notes = Counter(note for _, outcome in results for report in outcome.reports.values() for note in report.notes)
    for note, count in notes.items():
        terminalreporter.line(f"{count} times: {note}")
