"""``asynccomm bench``: latency and bandwidth of operations on this host, beside torch.distributed and MPI."""

from __future__ import annotations

import argparse
import asyncio
import os
import secrets
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from asynccomm.backends.names import backend_names
from asynccomm.benchmarks.mpi_launcher import why_not
from asynccomm.benchmarks.plot import plot
from asynccomm.benchmarks.rows import OPERATIONS, UNITS, USUAL, read_measurements
from asynccomm.benchmarks.session_options import SessionOptions
from asynccomm.cli.launch import LaunchOptions, launch
from asynccomm.cli.run import Commands, at_least_one, listen, path_argument, threads_of
from asynccomm.core.files import is_replaced

_DESCRIPTION = """\
Measure operations on this host: asynccomm beside torch.distributed (gloo, or NCCL where each rank has a GPU) and, where
mpi4py and mpiexec are installed, MPI.

    asynccomm bench
    asynccomm bench --ranks 4 --ops all_reduce,broadcast --min 8 --max 64M --json out.json --plot out.png

The columns are those of nccl-tests: the size is the larger one of a rank's input and output, algbw is size over time,
and busbw is algbw times the factor of the operation, which makes it comparable with the speed of the hardware. Each
round measures every contender once, in alternating order; times are medians over rounds, of rank 0.
"""

SMALLEST, LARGEST, FACTOR, ROUNDS = 8, 16 << 20, 8, 9
PEERS: Final = ("torch", "mpi")
_SESSION: Final = "asynccomm.benchmarks.session"


def add_command(commands: Commands) -> None:
    """Register ``bench`` with the command line."""
    parser = commands.add_parser(
        "bench",
        help="measure operations on this host",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="asynccomm bench [options]",
    )
    add = parser.add_argument
    add("--ranks", type=at_least_one, default=2, metavar="N", help="number of ranks (default: 2)")
    add("--ops", type=_words, default=list(USUAL), metavar="OP,...", help=f"of {', '.join(OPERATIONS)}")
    add("--sizes", type=_sizes, metavar="SIZE,...", help="in bytes, or as 64K, 4M, 1G")
    add("--min", type=_size, metavar="SIZE", help="the smallest size (default: 8)")
    add("--max", type=_size, metavar="SIZE", help="the largest size (default: 16M)")
    add("--factor", type=at_least_one, metavar="N", help="from one size to the next (default: 8)")
    add("--backend", default="auto", metavar="NAME", help="of asynccomm (default: auto)")
    add("--peers", type=_words, metavar="PEER,...", help="torch, mpi, or none (default: all that are installed)")
    add("--rounds", type=at_least_one, default=ROUNDS, metavar="N", help=f"medians are over them (default: {ROUNDS})")
    add("--json", type=path_argument, metavar="FILE", help="write the rows to FILE, after each operation and size")
    add(
        "--plot",
        type=path_argument,
        metavar="OUT.png",
        help="draw time and bus bandwidth; needs the extra 'plot' (matplotlib)",
    )
    parser.set_defaults(command=lambda arguments: _bench(parser, arguments), parser=parser)


def _bench(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    _check(parser, arguments)
    sizes, peers = _sizes_of(parser, arguments), _peers_of(parser, arguments)
    with tempfile.TemporaryDirectory(prefix="asynccomm-bench-") as folder:
        out = Path(folder, "rows.json") if arguments.json is None else arguments.json.absolute()
        session = SessionOptions(
            ops=arguments.ops,
            sizes=sizes,
            backend=arguments.backend,
            peers=peers,
            rounds=arguments.rounds,
            out=str(out),
        )
        try:
            code = _launch(arguments.ranks, session)
            if code == 0 and arguments.plot is not None:
                plot(read_measurements(out), arguments.plot)
        except (OSError, subprocess.SubprocessError) as exc:
            print(f"{parser.prog}: error: {exc}", file=sys.stderr)
            return 1
    return code


def _launch(ranks: int, session: SessionOptions) -> int:
    """Measure on new ranks; returns the exit code."""
    options = LaunchOptions(
        size=ranks,
        command=(sys.executable, "-m", _SESSION, session.to_json()),
        run_id=secrets.token_hex(8),
        threads=threads_of(os.environ, len(os.sched_getaffinity(0)), ranks),
        prefix=False,
    )
    return asyncio.run(launch(options, listen("127.0.0.1", 0)))


def _check(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with an error if an argument cannot be right by itself."""
    for op in arguments.ops:
        if op not in OPERATIONS:
            parser.error(f"argument --ops: {op!r} is not one of {', '.join(OPERATIONS)}")
    known = ["auto", *[name for name in backend_names() if name != "loopback"]]  # which is for the tasks of one process
    if arguments.backend not in known:
        parser.error(f"argument --backend: {arguments.backend!r} is not one of {', '.join(known)}")
    if "send_recv" in arguments.ops and arguments.ranks == 1:
        if arguments.ops != list(USUAL):
            parser.error("argument --ops: 'send_recv' needs at least 2 ranks, got --ranks 1")
        arguments.ops.remove("send_recv")
    for name, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path is not None and not path.parent.is_dir():
            parser.error(f"argument {name}: the folder {str(path.parent)!r} does not exist")
        if path is not None and path.is_dir():
            parser.error(f"argument {name}: must be a file, and {str(path)!r} is a folder")
    # the rows are written again and again: a pipe's reader would be gone
    if arguments.json is not None and not is_replaced(arguments.json):
        parser.error(
            f"argument --json: must be a file, and {str(arguments.json)!r} is a device, a pipe or an open file"
        )
    if arguments.plot is not None and find_spec("matplotlib") is None:
        parser.error(f"argument --plot: {str(arguments.plot)!r} needs matplotlib: pip install 'asynccomm[plot]'")


def _sizes_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[int]:
    if arguments.sizes is not None:
        for name in ("min", "max", "factor"):
            if (value := getattr(arguments, name)) is not None:
                parser.error(f"argument --{name}: cannot be given with --sizes, got {value}")
        return list(arguments.sizes)
    size = SMALLEST if arguments.min is None else arguments.min
    largest = LARGEST if arguments.max is None else arguments.max
    factor = FACTOR if arguments.factor is None else arguments.factor
    if size > largest:
        parser.error(f"argument --min: must be at most the largest size, {largest}, got {size}")
    if factor < 2:
        parser.error(f"argument --factor: must be at least 2, got {factor}")
    sizes = [size]
    while sizes[-1] * factor <= largest:
        sizes.append(sizes[-1] * factor)
    return sizes


def _peers_of(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> list[str]:
    if arguments.peers is None:
        return [peer for peer in PEERS if peer != "mpi" or (why_not() is None and arguments.backend != "nccl")]
    if arguments.peers == ["none"]:
        return []
    for peer in arguments.peers:
        if peer not in PEERS:
            parser.error(f"argument --peers: {peer!r} is not one of {', '.join(PEERS)}, none")
    if "mpi" in arguments.peers and (reason := why_not()) is not None:
        parser.error(f"argument --peers: {reason}")
    return list(arguments.peers)


def _words(text: str) -> list[str]:
    return text.split(",")


def _sizes(text: str) -> list[int]:
    return [_size(each) for each in text.split(",")]


def _size(text: str) -> int:
    number, unit = (text[:-1], UNITS[text[-1].upper()]) if text[-1:].upper() in UNITS else (text, 1)
    if not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"must be a number of bytes, as 8, 64K or 4M, got {text!r}")
    return int(number) * unit
