"""Errors of the types that torchcomms raises."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import final

from asynccomm.compat.renamed import Renamed


@final
class RefusedError(RuntimeError, ValueError):
    """A call with a wrong value: a RuntimeError, as in torchcomms, and a ValueError, as everywhere in asynccomm."""


@contextmanager
def refusing(names: Mapping[str, str] | None = None) -> Iterator[None]:
    """Raise RefusedError in place of ValueError; see Renamed for ``names``."""
    try:
        with Renamed(names or {}):
            yield
    except ValueError as exc:
        raise RefusedError(str(exc)) from exc
