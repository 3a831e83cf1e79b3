"""Many cases in one test, which names each that fails."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest


def cases(names: str, values: Iterable[Any], ids: Any = repr) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Like ``pytest.mark.parametrize``, but one test does all cases, one after the other.

    For cases that take microseconds and share no state: the fixtures of the test are made once. A failure is an
    exception group with the error of each case that failed, and a note with its name.

    Args:
        ids: makes the name of a case from its value, or the names in order.
    """
    arguments = [name.strip() for name in names.split(",")]
    table = [dict(zip(arguments, value if len(arguments) > 1 else (value,), strict=True)) for value in values]
    labels = list(ids) if not callable(ids) else [", ".join(ids(value) for value in row.values()) for row in table]

    def decorate(test: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            errors = []
            for label, row in zip(labels, table, strict=True):
                try:
                    test(**fixtures, **row)
                except (Exception, pytest.fail.Exception) as exc:
                    exc.add_note(f"in the case {label}")
                    errors.append(exc)
            if errors:
                raise BaseExceptionGroup(f"{len(errors)} of {len(table)} cases", errors)

        assert not inspect.iscoroutinefunction(test), "cases do not await"
        signature = inspect.signature(test)
        left = [parameter for name, parameter in signature.parameters.items() if name not in arguments]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate
