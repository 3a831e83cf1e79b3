"""The calls that take the ordinary path, where a backend has a faster one."""

from __future__ import annotations

from typing import Any

import pytest

from asynccomm import Work
from asynccomm.comm.submission import Submitter


def noted(monkeypatch: pytest.MonkeyPatch) -> list[Work[Any]]:
    """The Works that the ordinary path makes from now on."""
    works: list[Work[Any]] = []
    submit = Submitter.submit

    def made(*arguments: Any) -> Work[Any]:
        works.append(submit(*arguments))
        return works[-1]

    monkeypatch.setattr(Submitter, "submit", made)
    return works
