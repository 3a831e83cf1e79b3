"""Errors of the types that torchcomms raises."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import final


@final
class RefusedError(RuntimeError, ValueError):
    """A call with a wrong value: a RuntimeError, as in torchcomms, and a ValueError, as everywhere in asynccomm."""


@contextmanager
def refusing() -> Iterator[None]:
    """Raise RefusedError in place of ValueError."""
    try:
        yield
    except ValueError as exc:
        raise RefusedError(str(exc)) from exc
