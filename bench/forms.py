"""What the richer forms cost over the plain ones: lists, uneven parts, dims, several tensors, objects, dicts.

    python bench/forms.py --ranks 2 --json out.json

Each form is measured against the plain collective of as many bytes, in one interleaved run; ``times`` is how many times
as long it takes. The dict of tensors is measured against what one does without: gloo's object list for the shapes, and
a broadcast for each tensor.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from report import Results, print_table
from rounds import arguments, in_turns, start_ranks, timed
from torch import Tensor
from torch import distributed as dist

from asynccomm.benchmarks.operations import floats
from asynccomm.benchmarks.parts import uneven
from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.runner import run

SIZES = [8, 1 << 10, 64 << 10, 1 << 20, 16 << 20]  # bytes each rank brings

Run = Callable[[], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Times:
    """One form against a plain one."""

    form: str
    bytes: int
    ranks: int
    backend: str
    form_us: float
    plain: str
    plain_us: float
    times: float = field(init=False)  #: as long as the plain one

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", self.form_us / self.plain_us)


@dataclass(frozen=True)
class Case:
    """A form and the plain collective that moves as many bytes; ``make`` gives both for (comm, floats)."""

    form: str
    plain: str
    make: Callable[[Comm, int], tuple[Run, Run]]
    sizes: tuple[int, ...] = tuple(SIZES)


def _all_gather(c: Comm, n: int) -> tuple[Run, Run]:
    source, outputs, output = torch.ones(n), [torch.empty(n) for _ in range(c.size)], torch.empty(n * c.size)
    return lambda: c.all_gather(outputs, source), lambda: c.all_gather_single(output, source)


def _all_gather_v(c: Comm, n: int) -> tuple[Run, Run]:
    sizes = uneven(n * c.size, c.size)
    source, output = torch.ones(sizes[c.rank]), torch.empty(sum(sizes))
    even, whole = torch.ones(n), torch.empty(n * c.size)
    return lambda: c.all_gather_v(output, source, sizes), lambda: c.all_gather_single(whole, even)


def _all_gather_v_exchanged(c: Comm, n: int) -> tuple[Run, Run]:
    sizes = uneven(n * c.size, c.size)
    source, output = torch.ones(sizes[c.rank]), torch.empty(sum(sizes))
    even, whole = torch.ones(n), torch.empty(n * c.size)
    return lambda: c.all_gather_v(output, source), lambda: c.all_gather_single(whole, even)


def _all_gather_dim(c: Comm, n: int) -> tuple[Run, Run]:
    rows = max(1, n // 64)
    source, output, whole = torch.ones(rows, 64), torch.empty(rows, 64 * c.size), torch.empty(rows * c.size, 64)
    return lambda: c.all_gather_single(output, source, 1), lambda: c.all_gather_single(whole, source)


def _reduce_scatter(c: Comm, n: int) -> tuple[Run, Run]:
    share = max(1, n // c.size)
    inputs, output, source = [torch.ones(share) for _ in range(c.size)], torch.empty(share), torch.ones(share * c.size)
    return lambda: c.reduce_scatter(output, inputs), lambda: c.reduce_scatter_single(output, source)


def _reduce_scatter_v(c: Comm, n: int) -> tuple[Run, Run]:
    sizes = uneven(n, c.size)
    share = max(1, n // c.size)
    source, output = torch.ones(sum(sizes)), torch.empty(sizes[c.rank])
    even, part = torch.ones(share * c.size), torch.empty(share)
    return lambda: c.reduce_scatter_v(output, source, sizes), lambda: c.reduce_scatter_single(part, even)


def _all_to_all(c: Comm, n: int) -> tuple[Run, Run]:
    share = max(1, n // c.size)
    inputs, outputs = [torch.ones(share) for _ in range(c.size)], [torch.empty(share) for _ in range(c.size)]
    source, output = torch.ones(share * c.size), torch.empty(share * c.size)
    return lambda: c.all_to_all(outputs, inputs), lambda: c.all_to_all_single(output, source)


def _all_to_all_v(c: Comm, n: int) -> tuple[Run, Run]:
    parts = uneven(n, c.size)  # turned, so that all send and receive as much
    sends = [parts[(rank + c.rank) % c.size] for rank in range(c.size)]
    receives = sends
    share = max(1, n // c.size)
    rows, room = torch.ones(sum(sends)), torch.empty(sum(receives))
    source, output = torch.ones(share * c.size), torch.empty(share * c.size)
    return (
        lambda: c.all_to_all_v_single(room, rows, receives, sends),
        lambda: c.all_to_all_single(output, source),
    )


def _pieces(n: int, count: int = 300) -> list[Tensor]:
    """Tensors as a model has them: a few large, many small; ``n`` floats in all."""
    small = max(1, n // (20 * count))
    large = max(1, (n - small * (count // 2)) // (count - count // 2))
    return [torch.ones(large if i % 2 else small) for i in range(count)]


def _all_reduce_coalesced(c: Comm, n: int) -> tuple[Run, Run]:
    tensors = _pieces(n, 100)
    whole = torch.ones(sum(t.numel() for t in tensors))
    return lambda: c.all_reduce_coalesced(tensors), lambda: c.all_reduce(whole)


def _broadcast_coalesced(c: Comm, n: int) -> tuple[Run, Run]:
    tensors = _pieces(n)
    whole = torch.ones(sum(t.numel() for t in tensors))
    return lambda: c.broadcast_coalesced(tensors, 0), lambda: c.broadcast(whole, 0)


def _broadcast_state(c: Comm, n: int) -> tuple[Run, Run]:
    state = {f"layers.{i // 6}.block.{i % 6}.weight": t for i, t in enumerate(_pieces(n))}
    whole = torch.ones(sum(t.numel() for t in state.values()))
    return lambda: c.broadcast_state(state, 0), lambda: c.broadcast(whole, 0)


def _broadcast_object(c: Comm, n: int) -> tuple[Run, Run]:
    thing = {"step": 17, "name": "x" * (4 * n - 200 if n > 100 else 8), "rates": [0.1, 0.2, 0.3], "done": False}
    tensor = torch.ones(n)
    return lambda: c.broadcast_object(thing, 0), lambda: c.broadcast(tensor, 0)


def _tensor_dict(c: Comm, n: int) -> tuple[Run, Run]:
    tensors = {f"hidden_{i}": torch.ones(max(1, n // 8)) for i in range(8)}
    names = list(tensors)

    async def by_gloo() -> None:
        shapes: list[Any] = [{name: (t.shape, t.dtype) for name, t in tensors.items()} if c.rank == 0 else None]
        dist.broadcast_object_list(shapes, 0)
        for name in names:
            shape, dtype = shapes[0][name]
            dist.broadcast(tensors[name] if c.rank == 0 else torch.empty(shape, dtype=dtype), 0)

    return lambda: c.broadcast_tensor_dict(tensors if c.rank == 0 else None, 0), by_gloo


CASES = [
    Case("all_gather (list)", "all_gather_single", _all_gather),
    Case("all_gather_v", "all_gather_single", _all_gather_v),
    Case("all_gather_v, sizes exchanged", "all_gather_single", _all_gather_v_exchanged),
    Case("all_gather_single, dim 1", "all_gather_single", _all_gather_dim),
    Case("reduce_scatter (list)", "reduce_scatter_single", _reduce_scatter),
    Case("reduce_scatter_v", "reduce_scatter_single", _reduce_scatter_v),
    Case("all_to_all (list)", "all_to_all_single", _all_to_all),
    Case("all_to_all_v_single", "all_to_all_single", _all_to_all_v),
    Case("all_reduce_coalesced, 100 tensors", "all_reduce", _all_reduce_coalesced, (100 << 10, 1 << 20, 16 << 20)),
    Case("broadcast_coalesced, 300 tensors", "broadcast", _broadcast_coalesced, (1 << 20, 16 << 20, 64 << 20)),
    Case("broadcast_state, 300 tensors", "broadcast", _broadcast_state, (1 << 20, 16 << 20, 64 << 20)),
    Case("broadcast_object", "broadcast", _broadcast_object, (1 << 10, 64 << 10, 1 << 20)),
    Case(
        "broadcast_tensor_dict, 8 tensors", "gloo's objects and broadcasts", _tensor_dict, (1 << 10, 64 << 10, 1 << 20)
    ),
]


async def measure(comm: Comm, case: Case, nbytes: int, rounds: int) -> Times:
    """Meaningful on rank 0."""

    async def repeat(go: Run, count: int) -> None:
        for _ in range(count):
            await go()

    form, plain = case.make(comm, floats(nbytes))
    bodies = {
        "form": timed(lambda count: repeat(form, count)),
        "plain": timed(lambda count: repeat(plain, count)),
    }
    us = await in_turns(comm, bodies, rounds)
    return Times(
        form=case.form,
        bytes=nbytes,
        ranks=comm.size,
        backend=comm.backend,
        form_us=us["form"],
        plain=case.plain,
        plain_us=us["plain"],
    )


async def measure_all(args: argparse.Namespace) -> None:
    """On every rank; rank 0 reports."""
    async with new_comm(args.backend, name="bench") as comm:
        with Results[Times](print_times, args.json) as rows:
            for case in CASES:
                if args.only in case.form:
                    for nbytes in args.sizes or case.sizes:
                        rows.add(await measure(comm, case, nbytes, args.rounds))


def print_times(rows: Sequence[Times]) -> None:
    print_table(
        ["form", "bytes", "us", "plain", "plain us", "times"],
        [
            (row.form, row.bytes, f"{row.form_us:.1f}", row.plain, f"{row.plain_us:.1f}", f"{row.times:.2f}x")
            for row in rows
        ],
        f"{rows[0].ranks} ranks, {rows[0].backend}, {os.cpu_count()} cores, torch {torch.__version__}",
        left={"form", "plain"},
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser)
    parser.add_argument("--only", default="", help="forms whose name contains this")
    args = parser.parse_args()
    if not any(args.only in case.form for case in CASES):
        parser.error(f"argument --only: no form contains {args.only!r}; there are {', '.join(c.form for c in CASES)}")
    return args


def main() -> None:
    args = parse()
    start_ranks(args.ranks)
    dist.init_process_group("gloo")
    run(measure_all(args))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
