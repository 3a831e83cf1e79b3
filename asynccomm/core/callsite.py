"""The call site of an operation in the user's program. Captured for every operation, so formatting is deferred."""

from __future__ import annotations

import os
from importlib.util import find_spec
from sys import _getframe
from types import CodeType
from typing import Final

SHOWN: Final = 1024  # texts that are kept

CallSite = tuple[CodeType, int]  # and the offset of the instruction


def call_site(depth: int = 1) -> CallSite | None:
    """The innermost frame outside of this package, torch and the standard library, at least ``depth`` frames up.

    Between a user's ``backward()`` and a hook of a parameter lie frames of torch, and between a ``with`` statement and
    the context manager's code frames of contextlib. A frame of these is the site only where no user's frame lies above
    it, as in the threads of autograd.
    """
    try:
        frame = _getframe(depth)
    except ValueError:  # fewer frames than ``depth``: called from C, without a program in Python
        frame = _getframe(0)
    code = frame.f_code
    between: CallSite | None = None
    while (name := code.co_filename) not in user_files:
        if not _is_ours(name):
            if not _is_between(name):
                user_files.add(name)
                break
            between = between or (code, frame.f_lasti)
        passed_files.add(name)
        above = frame.f_back
        if above is None:
            return between
        frame = above
        code = frame.f_code
    return code, frame.f_lasti


def _torch_directory() -> str:
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return os.path.dirname(spec.origin) + os.sep


# the interpreter gives all files of a package the same prefix
_PACKAGE: Final = os.path.dirname(os.path.dirname(call_site.__code__.co_filename)) + os.sep
_USERS: Final = tuple([_PACKAGE + name + os.sep for name in ("testing", "benchmarks")])  # call it as users' code does
_TORCH: Final = _torch_directory()
_STANDARD: Final = os.path.dirname(os.__file__) + os.sep
_INSTALLED: Final = tuple([_STANDARD + name + os.sep for name in ("site-packages", "dist-packages")])
_EXTENSIONS: Final = os.sep + "typing_extensions.py"  # wraps torch's deprecated functions
user_files: set[str] = set()  #: files that call this package; bounded by the program's files
passed_files: set[str] = set()  #: files between them and the operation


def _is_ours(name: str) -> bool:
    return name.startswith(_PACKAGE) and not name.startswith(_USERS)


def _is_between(name: str) -> bool:
    """Whether a file is torch's, the standard library's, or typing_extensions."""
    if name.startswith(_STANDARD) and not name.startswith(_INSTALLED):
        return True
    return name.startswith(_TORCH) or name.endswith(_EXTENSIONS)


_shown: dict[tuple[int, int], tuple[CodeType, str]] = {}  # by id and instruction; a kept code object keeps its id


def show(site: CallSite | None) -> str:
    """``site`` as text; empty if unknown."""
    if site is None:
        return ""
    key = id(site[0]), site[1]
    shown = _shown.get(key)
    if shown is None:
        if len(_shown) >= SHOWN:
            _shown.clear()
        shown = _shown[key] = site[0], f"{site[0].co_filename}:{line_number(site)} in {site[0].co_name}"
    return shown[1]


def line_number(site: CallSite) -> int:
    """The line of the call in its file."""
    code, instruction = site
    for start, end, number in code.co_lines():
        if start <= instruction < end and number is not None:
            return number
    return code.co_firstlineno
