"""One rank is struck, and the others must know of it in time, by name, and leave nothing behind."""

from __future__ import annotations

import pytest

from .conftest import Runner, cases_of
from .plans import Case
from .verdicts import judge


def test_a_fault(fault_case: Case, fault_runner: Runner) -> None:
    outcome = fault_runner.outcome(fault_case)
    problems = judge(fault_case, outcome)
    if problems:
        pytest.fail("\n".join([str(fault_case), *problems, outcome.output]), pytrace=False)


def test_enough_of_them(request: pytest.FixtureRequest, fault_runner: Runner) -> None:
    """When all were collected, all have run, and they are not few."""
    asked = cases_of(request.config)
    worker = getattr(request.config, "workerinput", None)
    if worker is not None and not any("loadfile" in argument for argument in worker["mainargv"]):
        pytest.skip("each worker runs a part of them")
    if len(fault_runner.cases) == len(asked):
        assert len(fault_runner.results) == len(asked)
