"""A collective in two 64-bit words, so that ranks can compare their collectives cheaply.

The words hold all parts that must agree (kind, dtype, reduction, root, layout; number of elements; tag), and can be
turned back into a description, for the error if they differ. An operation with a method of its own has a kind of its
own. From the lowest bit on, the first word is::

    kind 7   tagged 1   dtype 8   reduction 4   root 20   layout 24

Ranks and reductions count from 1; 0 means none. The second word is the number of elements. A collective with parcels
has a bit for ``shared`` in place of dtype and reduction; its root is the giver, and its taker takes the place of the
layout. Its second word is a hash of the method's name and form.

A hash of the tag is XORed into the 24 highest bits of the second word. These bits are 0 for less than 2**40 elements,
so both parts can be read back. With more elements an error may state both wrongly, but every difference that is
detected without a tag is still detected: operations with the same tag differ if their numbers of elements do, and so do
an operation with a tag and one without. Two different tags go undetected with a probability of 2**-24, as do two
different layouts.
"""

from __future__ import annotations

import hashlib
import zlib
from array import array
from collections.abc import Sequence
from typing import Any, Final

import torch

from asynccomm.ops import (
    AllGather,
    AllGatherSingle,
    AllReduce,
    AllToAll,
    AllToAllSingle,
    Barrier,
    Broadcast,
    Gather,
    Op,
    Parcels,
    Reduce,
    ReduceScatter,
    ReduceScatterSingle,
    Scatter,
    TensorOp,
)
from asynccomm.ops.dtypes import BY_NAME
from asynccomm.ops.reduce_op import RedOpType, ReduceOp

Signature = tuple[int, int]

_KINDS: Final[tuple[tuple[type[Op], str], ...]] = (
    (Barrier, ""),
    (AllReduce, ""),
    (Broadcast, ""),
    (Reduce, ""),
    (AllGather, ""),
    (AllGatherSingle, ""),
    (ReduceScatter, ""),
    (ReduceScatterSingle, ""),
    (Scatter, ""),
    (Gather, ""),
    (AllToAllSingle, ""),
    (AllToAll, ""),
    (Parcels, ""),  # their second word has the method
    (AllGather, "dispatch"),
    (AllGatherSingle, "dispatch"),
    (AllToAll, "dispatch"),
    (ReduceScatter, "combine"),
    (ReduceScatterSingle, "combine"),
    (AllToAll, "combine"),
)
_NUMBERS: Final = {kind: number for number, kind in enumerate(_KINDS)}
_PARCELS: Final = _NUMBERS[Parcels, ""]
_DTYPES: Final = tuple(sorted(BY_NAME.values(), key=str))
_REDUCTIONS: Final = tuple(RedOpType)
_DTYPE: Final = 8  # the lowest bit of each field
_REDUCTION: Final = 16
_ROOT: Final = 20
_LAYOUT: Final = 40
_SHARED: Final = 1 << _DTYPE
_TAGGED: Final = 1 << 7
_KIND: Final = _TAGGED - 1  # the bits of the kind
_TAG: Final = 40  # the lowest bit of the tag's hash in the second word
REMEMBERED: Final = 4096  # cached tags, for errors: a program may use any number of tags
# the caches below grow with the number of different calls in a program
_codes: dict[tuple[type[Op], str, torch.dtype, RedOpType | None, int | None], int] = {}
_hashes: dict[tuple[str, str], int] = {}
_names: dict[int, tuple[str, str]] = {}  # the methods and forms that were hashed
_tag_hashes: dict[str, int] = {}
_tags: dict[int, str] = {}  # the tags that were hashed


def signature(op: Op) -> Signature:
    """The two words of ``op``; equal on two ranks if ``op.fits`` the other's, as far as one rank can decide."""
    if isinstance(op, TensorOp):
        reduction = op.reduction
        key = (type(op), op.method, op.dtype, None if reduction is None else reduction.type, op.root)
        code = _codes.get(key)
        if code is None:
            code = _codes[key] = _code(*key)
        if op.layout:
            code |= op.layout << _LAYOUT
        second = op.numel
    elif isinstance(op, Parcels):
        code, second = _of_parcels(op)
    elif isinstance(op, AllToAll):
        code, second = _code(AllToAll, op.method, op.dtype), 0
    else:
        code, second = _NUMBERS[type(op), op.method], 0
    if op.label:
        return code | _TAGGED, second ^ _hash_of_tag(op.label) << _TAG
    return code, second


def signature_of(ops: Sequence[Op]) -> Signature:
    """The two words of several operations that belong together; of a single operation, its own words."""
    if len(ops) == 1:
        return signature(ops[0])
    words = array("Q", [word for op in ops for word in signature(op)]).tobytes()
    digest = hashlib.blake2b(words, digest_size=16).digest()
    return int.from_bytes(digest[:8]), int.from_bytes(digest[8:])


def _code(
    kind: type[Op], method: str, dtype: torch.dtype, reduced: RedOpType | None = None, root: int | None = None
) -> int:
    code = _NUMBERS[kind, method] | _DTYPES.index(dtype) << _DTYPE
    if root is not None:
        code |= (root + 1) << _ROOT
    if reduced is not None:
        code |= (_REDUCTIONS.index(reduced) + 1) << _REDUCTION
    return code


def _hash_of_tag(tag: str) -> int:
    hashed = _tag_hashes.get(tag)
    if hashed is None:
        if len(_tag_hashes) >= REMEMBERED:
            _tag_hashes.clear()
            _tags.clear()
        # not a checksum: the checksums of two tags that differ in one digit would be related
        hashed = _tag_hashes[tag] = int.from_bytes(hashlib.blake2b(tag.encode(), digest_size=3).digest())
        _tags[hashed] = tag
    return hashed


def _of_parcels(op: Parcels) -> Signature:
    name = op.method, op.form
    hashed = _hashes.get(name)
    if hashed is None:
        hashed = _hashes[name] = zlib.crc32("".join(name).encode())
        _names[hashed] = name
    code = _PARCELS
    if op.shared:
        code |= _SHARED
    if op.giver is not None:
        code |= (op.giver + 1) << _ROOT
    if op.taker is not None:
        code |= (op.taker + 1) << _LAYOUT
    return code, hashed


def differing_layout(one: Signature, other: Signature) -> bool:
    """Whether two operations on tensors differ only in the layout of their shares."""
    low = (1 << _LAYOUT) - 1
    same = one[1] == other[1] and one[0] & low == other[0] & low
    return same and one != other and one[0] & _KIND != _PARCELS


def describe(words: Signature) -> str:
    """The text of the operation behind the words, as far as they determine it; for an error."""
    code, second = words
    if not code & _TAGGED:
        return _describe(code, second)
    tag = _tags.get(second >> _TAG)
    text = _describe(code & ~_TAGGED, second & (1 << _TAG) - 1).removesuffix(")")
    said = "tag unknown here" if tag is None else f"tag={tag!r}"
    return f"{text}{'' if text.endswith('(') else ', '}{said})"


def _describe(code: int, second: int) -> str:
    """As ``describe``, for words without a tag."""
    try:
        kind, method = _KINDS[code & _KIND]
        if kind is Barrier:
            return str(Barrier())
        if kind is Parcels:
            return _describe_parcels(code, second)
        dtype = _DTYPES[code >> _DTYPE & 0xFF]
        if kind is AllToAll:
            return f"{method or AllToAll.kind}({str(dtype).removeprefix('torch.')})"
        fields: dict[str, Any] = {"method": method, "dtype": dtype, "numel": second, "layout": code >> _LAYOUT}
        root = code >> _ROOT & 0xFFFFF
        if root:
            fields["root"] = root - 1
        reduction = code >> _REDUCTION & 0xF
        if reduction:
            of = _REDUCTIONS[reduction - 1]
            fields["reduction"] = ReduceOp.PREMUL_SUM(1) if of is RedOpType.PREMUL_SUM else ReduceOp(of)
        return str(kind(**fields))
    except (IndexError, TypeError):
        return f"something unknown ({code:#x}, {second})"


def _describe_parcels(code: int, hashed: int) -> str:
    # the names lack a method that this rank has not called
    name, form = _names.get(hashed, ("another method for objects or uneven tensors", ""))
    giver, taker = (code >> _ROOT & 0xFFFFF) - 1, (code >> _LAYOUT) - 1
    return str(Parcels(name, bool(code & _SHARED), giver if giver >= 0 else None, taker if taker >= 0 else None, form))
