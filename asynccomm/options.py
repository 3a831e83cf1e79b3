"""The options of a comm."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import final

MAX_SECONDS = 1e9  # beyond the range of the system's clocks: counts as infinite
DEFAULT_TIMEOUT = 600.0  # seconds; torchcomms' limit for set-up and for one operation
MAX_OPS = 4096  # operations in flight at which ready() begins to hold back
MAX_BYTES = 1 << 30  # bytes in flight at which ready() begins to hold back
MOST_RECORDED = 1 << 20
ORDERINGS = ("program", "agreed")
HINTS = {
    "control": '"off": no control channel, and with it no news of why others fail, no diagnosis, no shrinking (default '
    '"on")',
    "metrics": '"on": counters, histograms and the ranks that come last, in comm.statistics() (default "off")',
    "recorder": "number of last calls that the flight recorder keeps (default 256)",
}  # hints for the comms of every backend

_log = logging.getLogger("asynccomm")


def seconds(name: str, value: float | timedelta | None, default: float) -> float:
    """``value`` as seconds; None means ``default``; ``math.inf`` is allowed.

    Raises: TypeError, ValueError naming ``name``.
    """
    return default if value is None else duration(name, value)


def duration(name: str, value: float | timedelta) -> float:
    """``value`` as seconds; ``math.inf`` is allowed. Raises: TypeError, ValueError naming ``name``."""
    number = number_of_seconds(name, value)
    if not number > 0:  # nan, too
        raise ValueError(f"{name} must be positive, got {number!r}")
    return float(number)


def number_of_seconds(name: str, value: float | timedelta) -> float:
    """``value`` as seconds, of any sign; also nan. Raises: TypeError naming ``name``."""
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be seconds or a timedelta, got {value!r}")
    return math.inf if value > MAX_SECONDS else value


def check_bool(name: str, value: object) -> None:
    """Raise TypeError unless the argument ``name`` is True or False: a str such as "0" would count as True."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, got {value!r}")


def check_name(name: object, argument: str = "name") -> None:
    """Raise ValueError unless ``name`` can name a comm or a newcomer. Keys of the store contain the name, as UTF-8."""
    if not isinstance(name, str) or not name:
        raise ValueError(f"{argument} must be a non-empty str, got {name!r}")
    try:
        name.encode()
    except UnicodeEncodeError as exc:
        raise ValueError(f"{argument} must be a str that UTF-8 can encode, got {name!r}") from exc


def check_expect(expect: object) -> None:
    """Raise TypeError unless the argument ``expect`` is None or a class that isinstance() can check."""
    if expect is None:
        return
    if not isinstance(expect, type):
        raise TypeError(f"expect must be a class, got {expect!r}")
    try:
        isinstance(None, expect)
    except TypeError as exc:
        raise TypeError(f"expect must be a class that isinstance() can check, got {expect!r}: {exc}") from None


def check_hints(hints: Mapping[str, str] | None, known: Mapping[str, str], backend: str) -> dict[str, str]:
    """``hints`` as a dict of strings, without keys unknown to ``backend``, which are logged."""
    if hints is None:
        return {}
    check_strings(hints)
    if hints.get("control", "on") not in ("on", "off"):
        raise ValueError(f"hint 'control' must be 'on' or 'off', got {hints['control']!r}")
    if hints.get("metrics", "off") not in ("on", "off"):
        raise ValueError(f"hint 'metrics' must be 'on' or 'off', got {hints['metrics']!r}")
    recorded = whole_number(hints.get("recorder", "1"))
    if recorded is None or not 0 < recorded <= MOST_RECORDED:
        raise ValueError(f"hint 'recorder' must be an integer from 1 to {MOST_RECORDED}, got {hints['recorder']!r}")
    known = {**HINTS, **known}
    for key in sorted(hints.keys() - known.keys()):
        _log.warning("hint %r is unknown to backend %r and ignored; it knows %s", key, backend, sorted(known))
    return {key: value for key, value in hints.items() if key in known}


def whole_number(text: str) -> int | None:
    """The number that ``text`` writes in ASCII digits; None if it writes none, or one with too many digits for Python.

    For the values of hints and environment variables.
    """
    try:
        return int(text) if text.isascii() and text.isdecimal() else None
    except ValueError:
        return None


def check_strings(hints: object) -> None:
    """Raise TypeError unless ``hints`` is a mapping of strings to strings."""
    if not isinstance(hints, Mapping):
        raise TypeError(f"hints must be a mapping of strings to strings, got {hints!r}")
    for key, value in hints.items():
        if not isinstance(key, str) or not isinstance(value, str):
            raise TypeError(f"hints must map strings to strings, got {key!r}: {value!r}")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CommOptions:
    """The options of one comm, as ``comm.options`` shows them."""

    timeout: float = DEFAULT_TIMEOUT  #: seconds for set-up and, by default, for each operation
    hints: Mapping[str, str] = field(default_factory=dict)  #: the backend's hints, checked
    abort_process_on_timeout_or_error: bool = False  #: end the process when the comm breaks, instead of raising
    high_priority_stream: bool = False  #: CUDA only: run on a stream of high priority
    ordering: str = (
        "program"  #: source of the order of collectives: the program, or (``"agreed"``) an agreement among the ranks
    )
    max_ops: int = MAX_OPS  #: operations in flight at which ``await comm.ready()`` waits
    max_bytes: int = MAX_BYTES  #: bytes in flight at which ``await comm.ready()`` waits

    def __post_init__(self) -> None:
        check_bool("abort_process_on_timeout_or_error", self.abort_process_on_timeout_or_error)
        check_bool("high_priority_stream", self.high_priority_stream)
        if self.ordering not in ORDERINGS:
            raise ValueError(f"ordering must be one of {', '.join(map(repr, ORDERINGS))}, got {self.ordering!r}")
        for name in ("max_ops", "max_bytes"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
