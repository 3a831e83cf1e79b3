"""Methods of a comm that begin their usual calls in C, without a frame of Python code (``core/_methods.c``)."""

from __future__ import annotations

from collections.abc import Callable
from inspect import Parameter, signature
from typing import Any, TypeVar

from asynccomm.core.native import CoreUnavailable, load
from asynccomm.ops import Call, Several

_Method = TypeVar("_Method", bound=Callable[..., Any])


def direct(check: Callable[..., Call | Several], *names: str) -> Callable[[_Method], _Method]:
    """Begin the calls of a method in C, if C was built: of one that only submits the result of ``check``.

    This is for calls with positional arguments alone. All others, and calls that are not for the fast path, go on to
    the method. It remains a function where it is looked up, as by ``help`` and ``inspect.signature``.

    Args:
        check: as for ``CommBase._call``.
        names: those of the method's parameters that are the arguments of ``check``, the positional ones first.
    """

    def decorated(method: _Method) -> _Method:
        states = load("asynccomm.core._work")
        if isinstance(states, CoreUnavailable):
            return method
        all_of_them = signature(method).parameters
        parameters = [all_of_them[name] for name in names]
        defaults = tuple([each.default for each in parameters if each.default is not Parameter.empty])
        positional = [name for name, each in all_of_them.items() if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
        assert positional == ["self", *names[: len(positional) - 1]], f"{names} are no arguments of {method}"
        made = states.DirectMethod(method, check, defaults, len(parameters) - len(defaults), len(positional) - 1)
        return made  # type: ignore[no-any-return]

    return decorated
