"""What several tests of the face use."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest

import asynccomm.compat.c10d as dist

TABLES = ["_plugins", "backend_list", "default_device_backend_map", "backend_capability", "backend_type_map"]


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
