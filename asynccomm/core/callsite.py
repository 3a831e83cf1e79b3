"""Where in the user's program a call came from. Taken with every operation, so it costs little until it is shown."""

from __future__ import annotations

import os
from sys import _getframe
from types import CodeType
from typing import Final

CallSite = tuple[CodeType, int]  # and the instruction in it


def call_site(depth: int = 1) -> CallSite | None:
    """Where this package was called from; ``depth`` frames up, at least."""
    try:
        frame = _getframe(depth)
    except ValueError:  # it was called in another way
        frame = _getframe(1)
    code = frame.f_code
    while code.co_filename not in _users:
        if not _is_ours(code.co_filename):
            _users.add(code.co_filename)
            break
        above = frame.f_back
        if above is None:
            return None
        frame = above
        code = frame.f_code
    return code, frame.f_lasti


# the interpreter names all files of a package in the same way
_PACKAGE: Final = os.path.dirname(os.path.dirname(call_site.__code__.co_filename)) + os.sep
_users: set[str] = set()  # files that call this package; no more than a program has


def _is_ours(name: str) -> bool:
    if not name.startswith(_PACKAGE):
        return False
    return not name.startswith(f"{_PACKAGE}testing{os.sep}")  # which uses the package as its users do


def show(site: CallSite | None) -> str:
    """``site`` for people; empty if it is not known."""
    if site is None:
        return ""
    return f"{site[0].co_filename}:{line_number(site)} in {site[0].co_name}"


def line_number(site: CallSite) -> int:
    """The line of the call in its file."""
    code, instruction = site
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            return number
    return code.co_firstlineno
