"""The label of the steps of an operation: by it, ranks in different operations notice that they differ.

The operations of two calls may have equal steps: a sum of halves and a sum of floats both travel as floats. All steps
of a call therefore carry a label made of the call, and the backends that run the steps compare labels.
"""

from __future__ import annotations

import hashlib
import re
from typing import Final

from asynccomm.backends.base import Submission
from asynccomm.backends.gloo.frames import digest
from asynccomm.ops import Op
from asynccomm.ops.signature import signature

REMEMBERED: Final = 4096  # calls, for errors
HASH_DIGITS: Final = 24  # at the end of a label
_MARK: Final = re.compile(rf"#([0-9a-f]{{{HASH_DIGITS}}})")

_calls: dict[str, Op] = {}  # by the hash in their label


def label_of(submission: Submission) -> str:
    """The label of the steps of ``submission``, equal on two ranks if their operations fit each other."""
    op = submission.op
    words = (*signature(op), digest(submission))
    hashed = hashlib.blake2b(repr(words).encode(), digest_size=HASH_DIGITS // 2).hexdigest()
    label = f"{op.name} #{hashed}"
    remember(label, op)
    return label


def remember(label: str, op: Op) -> None:
    """Note that ``label`` stands for ``op``: with each call, as old labels are forgotten."""
    if len(_calls) >= REMEMBERED:
        _calls.clear()
    _calls[label[-HASH_DIGITS:]] = op


def call_behind(step: str) -> str:
    """The call that the text of a step belongs to, as far as this rank has made such a call."""
    found = _MARK.search(step)
    if found is None:
        return step
    op = _calls.get(found[1])
    return "another call" if op is None else str(op)
