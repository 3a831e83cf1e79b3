"""What a hint of a backend is worth: one comm per value, interleaved in the same processes.

    python bench/hints.py --backend gloo --hint gloo_threads=1,2 --op all_reduce --sizes 1048576,67108864 --ranks 2

A row per size, a column per value; medians over rounds of rank 0's microseconds for one operation. Without
--backend, it is measured on the one that knows the hint; one that all know (control=on,off) on shm.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import torch
from report import Results, print_table
from rounds import Body, arguments, in_turns, start_ranks, timed

from asynccomm.backends.names import backend_names
from asynccomm.backends.registry import load_backend
from asynccomm.benchmarks.operations import OPS, SIZES, MeasuredOp, floats, one_way
from asynccomm.comm.comm import Comm
from asynccomm.comm.new_comm import new_comm
from asynccomm.options import HINTS, check_hints
from asynccomm.runner import run

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class HintRow:
    """One operation with one value of a hint."""

    op: str
    bytes: int  #: what each rank brings
    ranks: int
    backend: str
    hint: str
    value: str
    us: float  #: microseconds of one operation


def contender(op: MeasuredOp, comm: Comm, n: int) -> Body:
    output, source = op.tensors(n, comm.rank, comm.size)

    async def run_on(count: int) -> None:
        for _ in range(count):
            await op.ours(comm, output, source)

    return timed(run_on)


async def measure_all(args: argparse.Namespace) -> None:
    """On every rank; rank 0 reports."""
    key, values = args.hint
    op = OPS[args.op]
    async with AsyncExitStack() as stack:
        start = await stack.enter_async_context(new_comm(args.backend, name="bench"))
        comms = {
            value: await stack.enter_async_context(new_comm(args.backend, name=f"{key}={value}", hints={key: value}))
            for value in values
        }
        rows = stack.enter_context(Results[HintRow](partial(report, values=values), args.json))
        for nbytes in args.sizes:
            bodies = {value: contender(op, comm, floats(nbytes)) for value, comm in comms.items()}
            us = await in_turns(start, bodies, args.rounds)
            for value in values:
                rows.add(
                    HintRow(
                        op=op.name,
                        bytes=nbytes,
                        ranks=start.size,
                        backend=start.backend,
                        hint=key,
                        value=value,
                        us=one_way(op.name, us[value]),
                    )
                )


def report(rows: list[HintRow], values: list[str]) -> None:
    first = rows[0]
    title = f"us of {first.op}, {first.backend}, {first.ranks} ranks, {os.cpu_count()} cores, by {first.hint}"
    lines: dict[int, list[object]] = {}
    for row in rows:
        lines.setdefault(row.bytes, [row.bytes]).append(f"{row.us:.2f}")
    print_table(["bytes", *values], lines.values(), title)


def parse() -> argparse.Namespace:
    def assignment(text: str) -> tuple[str, list[str]]:
        key, equals, values = text.partition("=")
        if not equals or not key or not all(values.split(",")):
            raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE,VALUE,...")
        return key, list(dict.fromkeys(values.split(",")))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments(parser, SIZES)
    parser.add_argument("--hint", type=assignment, required=True, metavar="KEY=VALUE,...", help="what to sweep")
    parser.add_argument("--op", default="all_reduce", choices=list(OPS))
    args = parser.parse_args()
    key, values = args.hint
    known = {}
    for name in backend_names():
        with contextlib.suppress(ValueError):  # not for the CPU
            known[name] = load_backend(name, CPU)
    if args.backend == "auto":
        known_to = {name for name, backend in known.items() if key in backend.hints}
        args.backend = "shm" if key in HINTS else next(iter(known_to), None)
        if args.backend is None:
            parser.error(f"argument --hint: no backend knows {key!r}")
    elif args.backend not in known:
        parser.error(f"argument --backend: {args.backend!r} is not one of auto, {', '.join(known)}")
    backend = known[args.backend]
    if key not in {**HINTS, **backend.hints}:
        knows = ", ".join(sorted({**HINTS, **backend.hints}))
        parser.error(f"argument --hint: {args.backend} knows no {key!r}; it knows {knows}")
    try:
        for value in values:
            backend.check_hints(check_hints({key: value}, backend.hints, args.backend))
    except ValueError as exc:
        parser.error(f"argument --hint: {exc}")
    return args


def main() -> None:
    args = parse()
    start_ranks(args.ranks)
    run(measure_all(args))


if __name__ == "__main__":
    main()
