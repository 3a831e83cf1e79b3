"""A hook that writes the operations of comms to a file, in the format of torchcomms' ``clog``.

One line each, with fields separated by ``|``; times are in seconds since the first line::

    V|1|base_timestamp=1700000000.000
    new_comm|comm=main|rank=0|world_size=2
    C1|sig|all_reduce|in_count=4|out_count=4|dtype=f32|red_op=sum|async_op=t|comm=main
    C1|Q|work_id=1|+0.003
    C1|S|+0.003
    C1|W|+0.004
    C1|E|+0.005

A kind of call gets a number, C1, and one line with its signature. Then each call has a line Q when it is made; with
``"LIFECYCLE"`` also S when its operation has started, W when its TorchWork is first waited for, E when it has ended.
Source of the format: torchcomms' ``hooks/clog/ClogHook.cpp``. Counts are elements.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor

from asynccomm.compat.torchcomms.registration import HookedComm, OpArguments
from asynccomm.ops.reduce_op import ReduceOp

_VERSION: Final = 1
_LIFECYCLE: Final = ("S", "W", "E")
_EVENTS: Final = ("ALL", "LIFECYCLE", "NONE", "Q", *_LIFECYCLE)
_VERBOSE: Final = ("buffers",)

_DTYPES: Final = {
    torch.float32: "f32",
    torch.float64: "f64",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.float8_e4m3fn: "fp8e4m3",
    torch.float8_e5m2: "fp8e5m2",
}

# by operation: the places of input and output among the arguments, and of other fields
_FIELDS: Final[dict[str, tuple[int | None, int | None, dict[str, int]]]] = {
    "all_reduce": (0, 0, {"red_op": 1}),
    "reduce": (0, 0, {"red_op": 2, "root": 1}),
    "broadcast": (0, 0, {"root": 1}),
    "send": (0, None, {"peer": 1}),
    "recv": (None, 0, {"peer": 1}),
    **dict.fromkeys(("all_gather", "all_gather_single", "all_to_all", "all_to_all_single"), (1, 0, {})),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_single"), (1, 0, {"red_op": 2})),
    **dict.fromkeys(("scatter", "gather", "gather_single"), (1, 0, {"root": 2})),
    "all_to_all_v_single": (1, 0, {"in_splits": 3, "out_splits": 2}),
}


@final
class clog:
    """Logs the signatures and the progress of operations to a file.

    Args:
        output: path of the file, which is overwritten; one for each process.
        events: "ALL" and "LIFECYCLE" for S, W and E; or some of these letters. Q is always logged; "NONE": only Q.
        verbose: "buffers" for the addresses of tensors.

    Raises: ValueError for other events and fields; OSError if the file cannot be opened.
    """

    def __init__(self, output: str | os.PathLike[str], events: Sequence[str], verbose: Sequence[str] = ()) -> None:
        for name, given, known in (("events", events, _EVENTS), ("verbose", verbose, _VERBOSE)):
            if isinstance(given, str) or not all(each in known for each in given):
                raise ValueError(f"{name} must be a list of {', '.join(known)}, got {given!r}")
        every = "ALL" in events or "LIFECYCLE" in events
        self._letters = {letter for letter in _LIFECYCLE if every or letter in events}
        self._buffers = "buffers" in verbose
        self._lock = threading.Lock()
        self._kinds: dict[str, int] = {}
        self._works = itertools.count(1)
        self._calls: dict[int, int] = {}  # the kind of call, between the hooks of an operation
        self._comms: weakref.WeakSet[Any] = weakref.WeakSet()
        self._file = Path(output).open("w", buffering=1)  # noqa: SIM115 - closed by the next line
        weakref.finalize(self, self._file.close)
        self._base = time.time()
        self._write(f"V|{_VERSION}|base_timestamp={self._base:.3f}")

    def register_with_comm(self, comm: HookedComm) -> None:
        """Log the operations of ``comm`` and of comms split off it from now on. Raises: RuntimeError if it is known."""
        self._write(f"new_comm|comm={comm.get_name()}|rank={comm.get_rank()}|world_size={comm.get_size()}")
        self._follow(comm)

    def flush(self) -> None:
        """Hand all lines to the operating system."""
        with self._lock:
            self._file.flush()

    def _follow(self, comm: HookedComm) -> None:
        if comm in self._comms:
            raise RuntimeError(f"comm {comm.get_name()!r} is registered already")
        self._comms.add(comm)
        parent = comm.get_name()

        def split(name: str, ranks: Sequence[int], child: HookedComm | None) -> None:
            self._write(f"split|parent={parent}|child={name}|ranks={','.join(map(str, ranks))}")
            if child is not None:
                self._follow(child)

        comm.register_pre_hook(lambda name, number, given: self._called(parent, name, number, given))
        comm.register_post_hook(self._started)
        comm._hooks.on_split.append(split)

    def _called(self, comm: str, name: str, number: int, given: OpArguments) -> None:
        signature = f"{self._signature(name, given)}|comm={comm}"
        with self._lock:
            new = signature not in self._kinds
            kind = self._kinds.setdefault(signature, len(self._kinds) + 1)
            self._calls[number] = kind
            if new:
                self._file.write(f"C{kind}|sig|{signature}\n")
            self._file.write(f"C{kind}|Q|work_id={next(self._works)}|{self._now()}\n")

    def _started(self, number: int, given: OpArguments) -> None:
        kind, work = self._calls.pop(number, None), given.work
        if kind is None or work is None:
            return  # this hook was registered during the call
        self._event(kind, "S")
        if "W" in self._letters and given.async_op:
            work._waited_for = lambda: self._event(kind, "W")
        if "E" in self._letters:
            once = itertools.count()  # a Work may notify twice
            work._work.listen(lambda: None if next(once) else self._event(kind, "E"))

    def _event(self, kind: int, letter: str) -> None:
        if letter in self._letters:
            self._write(f"C{kind}|{letter}|{self._now()}")

    def _now(self) -> str:
        return f"+{max(0.0, time.time() - self._base):.3f}"

    def _write(self, line: str) -> None:
        with self._lock:
            self._file.write(f"{line}\n")

    def _signature(self, name: str, given: OpArguments) -> str:
        last = f"async_op={'t' if given.async_op else 'f'}"
        if name == "batch_op_issue":
            return f"{name}|num_ops={len(given.arguments[0])}|{last}"
        if name not in _FIELDS:
            return f"{name}|{last}"
        into, out, others = _FIELDS[name]
        inputs = None if into is None else given.arguments[into]
        outputs = None if out is None else given.arguments[out]
        splits = {label: place for label, place in others.items() if label.endswith("_splits")}
        fields = [name, *(f"{label}={_shown(given.arguments[place])}" for label, place in splits.items())]
        if not splits:
            fields += [_count("in", inputs), _count("out", outputs)]
        dtypes = [tensor.dtype for tensor in (*_tensors(inputs), *_tensors(outputs))]
        fields += [f"dtype={_DTYPES.get(dtype, str(dtype).removeprefix('torch.'))}" for dtype in dtypes[:1]]
        fields += [
            f"{label}={_shown(given.arguments[place])}" for label, place in others.items() if label not in splits
        ]
        fields.append(last)
        if self._buffers:
            sides = [("buf", inputs)] if into == out else [("in", inputs), ("out", outputs)]
            fields += [
                f"{side}={','.join(hex(tensor.data_ptr()) for tensor in _tensors(tensors))}" for side, tensors in sides
            ]
        return "|".join(fields)


def _tensors(given: object) -> list[Tensor]:
    """The tensors of one side; none on a rank that has no part in it."""
    return [given] if isinstance(given, Tensor) else list(given) if isinstance(given, Sequence) else []


def _count(side: str, given: object) -> str:
    counts = ",".join(str(tensor.numel()) for tensor in _tensors(given))
    return f"{side}_count={counts or 0}" if isinstance(given, Tensor) or given is None else f"{side}_counts={counts}"


def _shown(value: object) -> str:
    """A root, split sizes, or a reduction by its short name."""
    if isinstance(value, (int, Sequence)):
        return ",".join(map(str, value)) if isinstance(value, Sequence) else str(value)
    kind = ReduceOp.of(value).type.name.lower()
    return "prod" if kind == "product" else kind
