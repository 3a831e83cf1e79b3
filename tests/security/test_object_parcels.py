"""Objects and dicts of tensors with mistakes in them, whose checksums are right: only ever a PayloadError.

In a process of its own whose memory is limited: what a sender may make a receiver use up is not bounded.
"""

from __future__ import annotations

import dataclasses
import enum
import io
import os
import pickle
import random
import resource
import struct
import subprocess
import sys
import warnings
import zlib
from collections import Counter, OrderedDict
from datetime import UTC, datetime
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any
from uuid import UUID

import numpy
import pytest
import torch

from asynccomm.errors import PayloadError
from asynccomm.serialization import objects, tensor_dicts
from asynccomm.serialization.objects import IncomingObject, PayloadKind, encode
from asynccomm.serialization.plain import dump_plain
from asynccomm.serialization.values import register_safe

try:
    from .mutations import mutated
except ImportError:  # as the program below
    sys.path.insert(0, str(Path(__file__).parent))
    from mutations import mutated  # type: ignore[import-not-found,no-redef]


@register_safe
class Color(enum.Enum):
    RED = 1


armed = False  # whether a call of a method of Trap ends the program


def trap(*_: object) -> None:
    if armed:
        os._exit(9)


@register_safe
@dataclasses.dataclass
class Trap:
    """A registered class whose methods end the program: a receiver sets the fields, and calls nothing."""

    item: Any
    __post_init__ = __call__ = __setstate__ = __setitem__ = append = extend = add = update = trap  # by pickles


MEMORY = 6 << 30  # bytes of address space
OBJECTS = [
    {"a": [1, 2.5, None, True, (1, 2), {3}, b"x" * 30, "text"], "t": torch.arange(5.0)},
    [torch.ones(2, 3), torch.ones(4, dtype=torch.bfloat16)],
    1 + 2j,
    2**100,
    "x" * 300,
    {(1, (2, (3,))): {}},
    OrderedDict(a=torch.ones(3), b={"c": torch.arange(4)}),  # and what goes through torch.save
    torch.nn.Linear(2, 3).state_dict(),
    torch.nn.Parameter(torch.ones(3)),
    [torch.ones(2).to_sparse()],
    {"at": datetime(2024, 1, 1, tzinfo=UTC), "out": Path("x/y"), "n": [Decimal("1.5"), Fraction(1, 3), UUID(int=5)]},
    [numpy.arange(6.0).reshape(2, 3), numpy.zeros(2, [("a", "i4"), ("b", "S2")]), numpy.float32(2)],
    [Trap([1, Trap(None)]), Color.RED, torch.nn.Parameter(torch.ones(2)), {Color.RED: (Trap(1),)}],
]


def take(choose: random.Random) -> str:
    parcel = encode(PayloadKind.OBJECT, choose.choice(OBJECTS))
    form, kind, _, count, size = objects._PREFIX.unpack_from(parcel.head)
    end = len(parcel.head) - size
    body = mutated(parcel.head[end:], choose)
    metas = parcel.head[objects._PREFIX.size : end]
    if choose.random() < 0.2:
        metas = mutated(metas, choose)
    head = objects._PREFIX.pack(form, kind, zlib.crc32(body), count, len(body)) + metas + body
    try:
        incoming = IncomingObject(1, head, parcel.nbytes)
        for place in incoming.places:
            place.zero_()
        assert sum([place.nbytes for place in incoming.places]) == parcel.nbytes
        incoming.decode(weights_only=True)
    except PayloadError:
        return "refused"
    return "taken"


def take_schema(choose: random.Random) -> str:
    described = tensor_dicts.describe({"a": torch.ones(3), "b": {"c": [torch.ones(2), 1]}}, torch.device("cpu"))
    data = mutated(described.schema, choose)
    slot = choose.choice([0, 1, 17, 255])
    head = tensor_dicts._HEAD.pack(1, PayloadKind.TENSOR_DICT, slot, zlib.crc32(data), len(data)) + data
    try:
        schema, _ = tensor_dicts.ReceiverSchemaCache().read((1, 0), head)
        with objects.reading(1):
            schema.build([torch.ones(1)] * len(schema.metas), [1])
    except PayloadError:
        return "refused"
    return "taken"


class Opener:
    """Pickles as a call that leaves a trace."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def test_code_in_nodes_does_not_run(tmp_path: Path) -> None:
    """Pickles with calls, as the nodes themselves, as an object that torch loads, and calls of registered classes."""
    saved = io.BytesIO()
    torch.save([Opener(tmp_path / "b")], saved)
    name = f"{Trap.__module__}.Trap"
    for body, text in [
        (pickle.dumps(([Opener(tmp_path / "a")], 0, None)), "names posix.mkdir"),
        (pickle.dumps(([Path("x")], 0, None)), "names pathlib"),
        (pickle.dumps(([numpy.arange(2)], 0, None)), "names numpy"),
        (pickle.dumps(([Color.RED], 0, None)), "names .*Color"),
        (dump_plain(([("rest", 0)], 0, saved.getvalue())), "refused: unsupported GLOBAL posix.mkdir"),
        (dump_plain((["x", ("dataclass", name, ["append"], [0])], 1, None)), "has other fields here"),
        (dump_plain((["x", ("dataclass", "posix.mkdir", ["x"], [0])], 1, None)), "posix.mkdir is not registered here"),
        (dump_plain((["x", ("path", "mkdir", "x")], 1, None)), "KeyError"),
        (dump_plain(([("array", "|O", (1,), "C", 0)], 0, None)), "object, which is refused"),
        (dump_plain(([("scalar", "|O", bytes(8))], 0, None)), "object, which is refused"),
    ]:
        head = struct.pack("<BBIIQ", 3, PayloadKind.OBJECT, zlib.crc32(body), 0, len(body)) + body
        with pytest.raises(PayloadError, match=text):
            IncomingObject(1, head, 0).decode(weights_only=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("seed", range(2))
def test_bodies_that_are_almost_right(seed: int) -> None:
    """Any other exception ends the program with its traceback."""
    done = subprocess.run(
        [sys.executable, __file__, str(seed)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "'refused'" in done.stdout
    assert "'taken'" in done.stdout


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    armed = True
    warnings.simplefilter("ignore")
    choose = random.Random(int(sys.argv[1]))
    print(Counter([take(choose) for _ in range(400)] + [take_schema(choose) for _ in range(400)]))
