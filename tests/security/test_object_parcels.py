"""Objects and dicts of tensors with mistakes in them, whose checksums are right: only ever a PayloadError.

In a process of its own whose memory is limited: what a sender may make a receiver use up is not bounded.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import warnings
import zlib
from collections import Counter, OrderedDict
from pathlib import Path

import pytest
import torch

from asynccomm.errors import PayloadError
from asynccomm.serialization import objects, tensor_dicts
from asynccomm.serialization.objects import IncomingObject, PayloadKind, encode

try:
    from .mutations import mutated
except ImportError:  # as the program below
    sys.path.insert(0, str(Path(__file__).parent))
    from mutations import mutated  # type: ignore[import-not-found,no-redef]

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
    warnings.simplefilter("ignore")
    choose = random.Random(int(sys.argv[1]))
    print(Counter([take(choose) for _ in range(400)] + [take_schema(choose) for _ in range(400)]))
