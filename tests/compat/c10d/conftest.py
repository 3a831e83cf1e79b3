"""What several tests of the face use."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

import asynccomm.compat.c10d as dist
from tests.compat.c10d.worlds import default_backend

TABLES = ["_plugins", "backend_list", "default_device_backend_map", "backend_capability", "backend_type_map"]

# Tests in these files run on each of these backends, with all ranks in one process.
ON_BACKENDS: Final = {"collectives", "reductions", "p2p", "objects", "coalescing", "examples"}
BACKENDS: Final = ["loopback", "shm", "gloo"]
# A rank that sends without waiting for the others is done before they find that they differ.
DONE_BEFORE: Final = {"shm"}
NOT_ON: Final = {
    "test_ranks_that_disagree_are_told": DONE_BEFORE,
    "test_complex_tensors_as_they_are": DONE_BEFORE,
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    file = Path(str(metafunc.definition.path)).stem.removeprefix("test_")
    if file in ON_BACKENDS and inspect.iscoroutinefunction(metafunc.function):
        metafunc.fixturenames.append("backend_of_worlds")
        backends = [b for b in BACKENDS if b not in NOT_ON.get(metafunc.function.__name__, ())]
        metafunc.parametrize("backend_of_worlds", backends, indirect=True)


@pytest.fixture
def backend_of_worlds(request: pytest.FixtureRequest) -> Iterator[str]:
    """The backend of the groups that a test makes without naming one."""
    token = default_backend.set(request.param)
    yield request.param
    default_backend.reset(token)


@pytest.fixture
def tables() -> Iterator[None]:
    """What a test registers is forgotten."""
    before = {name: copy.copy(getattr(dist.Backend, name)) for name in TABLES}
    names = set(vars(dist.Backend))
    yield
    for name in set(vars(dist.Backend)) - names:
        delattr(dist.Backend, name)
    for name, value in before.items():
        setattr(dist.Backend, name, value)
