"""``asynccomm run``: start a script on N ranks of this host, and on others together with their launchers."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import urlsplit

from asynccomm.cli.environment import cpu_sets
from asynccomm.cli.launch import GRACE_SECONDS, LaunchOptions, launch
from asynccomm.cli.nodes import NodeOptions
from asynccomm.cli.traced_run import traced
from asynccomm.core.hosts import loopback_address
from asynccomm.errors import RendezvousError

_DESCRIPTION = """\
Run a script on N ranks of this node, with the environment that torchrun would give it.

    asynccomm run -n 4 train.py --lr 0.1
    asynccomm run -n 4 -m package.train --lr 0.1

On several nodes, the same command runs on each of them; node 0 hosts the store:

    asynccomm run --nodes 2 --node-rank 0 --store node0:29500 -n 4 train.py
    asynccomm run --nodes 2 --node-rank 1 --store node0:29500 -n 4 train.py

Each line that a rank prints is passed on with its rank in front. The first rank that fails ends the run: its error is
printed once more at the end, and its exit code is the launcher's (128 + number when a signal killed it). Ctrl-C,
SIGTERM and SIGHUP are passed on to the ranks, which have --grace seconds to end; a second Ctrl-C kills them. Rank 0
reads the launcher's stdin, the others read nothing.
"""


class Commands(Protocol):
    """The object that argparse's ``add_subparsers`` returns."""

    def add_parser(
        self,
        name: str,
        *,
        help: str,
        description: str,
        formatter_class: type[argparse.HelpFormatter],
        allow_abbrev: bool,
        usage: str,
    ) -> argparse.ArgumentParser: ...


def add_command(commands: Commands) -> None:
    """Register ``run`` with the command line."""
    parser = commands.add_parser(
        "run",
        help="run a script on N ranks of this host",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="asynccomm run [--nodes N --node-rank K --store HOST:PORT] -n N [options] [-m] SCRIPT [ARGUMENT ...]",
    )
    _add_arguments(parser)
    parser.set_defaults(command=lambda arguments: _run(parser, arguments), parser=parser)


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("-n", "--ranks", type=at_least_one, required=True, metavar="N", help="number of ranks on this node")
    add("--nodes", type=at_least_one, default=1, metavar="N", help="number of nodes, which all run this command")
    add("--node-rank", type=_number, metavar="K", help="number of this node, from 0")
    store = "where node 0 hosts the store, as all nodes reach it"
    add("--store", type=_address, metavar="HOST:PORT", help=store)
    add("-m", "--module", action="store_true", help="SCRIPT is the name of a module, as for python -m")
    add("--master-port", type=_port, default=0, metavar="PORT", help="where the store listens (default: any free port)")
    add("--run-id", type=_run_id, metavar="ID", help="name of the run, TORCHELASTIC_RUN_ID (default: random)")
    add("--cpus-per-rank", type=at_least_one, metavar="K", help="pin each rank to K CPUs of its own, with K threads")
    add("--log-dir", type=path_argument, metavar="DIR", help="write what ranks print to DIR/rank0.log, ... instead")
    add("--tee", action="store_true", help="with --log-dir: print it as well")
    add("--no-prefix", action="store_true", help="pass lines on without their rank in front")
    grace = f"time that ranks get to end after a signal (default: {GRACE_SECONDS:g})"
    add("--grace", type=_seconds, default=GRACE_SECONDS, metavar="SECONDS", help=grace)
    add("--trace", type=path_argument, metavar="OUT.json", help="write a trace of all ranks, for Perfetto")
    add("--elastic", action="store_true", help="go on when a rank is lost (see Comm.shrink)")
    least = "an elastic run fails when fewer ranks are left (default: 1)"
    add("--min-ranks", type=at_least_one, metavar="N", help=least)
    restart = "elastic, and N lost ranks are replaced: ASYNCCOMM_NEWCOMER is set for newcomers, which call join_comm"
    add("--restart", type=at_least_one, metavar="N", help=restart)
    program = "a Python script, or a module with -m, and its arguments, which it gets as they are"
    add("program", metavar="SCRIPT", nargs=argparse.PARSER, help=program)


def _run(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    options = _options(parser, arguments)
    nodes = options.nodes
    where = ("127.0.0.1", arguments.master_port) if nodes is None else (nodes.host, nodes.port)
    try:
        listening = None if nodes is not None and nodes.number > 0 else listen(_host_to_listen_at(where[0]), where[1])
    except OSError as exc:
        name = "--master-port" if nodes is None else "--store"
        parser.error(f"argument {name}: cannot listen at {where[0]}:{where[1]}: {exc.strerror}")
    try:
        with contextlib.ExitStack() as resources:
            resources.enter_context(listening or contextlib.nullcontext())
            try:
                resources.enter_context(traced(arguments.trace))
            except OSError as exc:
                parser.error(f"argument --trace: cannot write to {str(arguments.trace)!r}: {exc.strerror}")
            return asyncio.run(launch(options, listening))
    except RendezvousError as exc:
        return _fail(parser, str(exc))
    except (OSError, subprocess.SubprocessError) as exc:
        return _fail(parser, f"cannot start the ranks: {exc}")


def _options(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> LaunchOptions:
    """Check the arguments beyond argparse's own checks, and create the log folder."""
    size, per_rank, log_dir = arguments.ranks, arguments.cpus_per_rank, arguments.log_dir
    program = arguments.program[1:] if arguments.program[0] == "--" else arguments.program
    if not program:
        parser.error("the following arguments are required: SCRIPT")
    if not arguments.module and not os.path.exists(program[0]):
        parser.error(f"argument SCRIPT: {program[0]!r} does not exist")
    if arguments.trace is not None and not arguments.trace.parent.is_dir():
        parser.error(f"argument --trace: the folder {str(arguments.trace.parent)!r} does not exist")
    if arguments.trace is not None and arguments.trace.is_dir():
        parser.error(f"argument --trace: must be a file, and {str(arguments.trace)!r} is a folder")
    if arguments.tee and log_dir is None:
        parser.error("argument --tee: needs --log-dir")
    elastic = arguments.elastic or arguments.restart is not None
    if arguments.min_ranks is not None and not elastic:
        parser.error("argument --min-ranks: needs --elastic")
    if arguments.min_ranks is not None and arguments.min_ranks > size:
        parser.error(f"argument --min-ranks: must be at most the number of ranks, {size}, got {arguments.min_ranks}")
    nodes = _nodes(parser, arguments, elastic)
    cpus = os.sched_getaffinity(0)
    try:
        sets = cpu_sets(cpus, size, per_rank) if per_rank else []
    except ValueError as exc:
        parser.error(f"argument --cpus-per-rank: {per_rank}: {exc}")
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            parser.error(f"argument --log-dir: cannot make {str(log_dir)!r}: {exc.strerror}")
    return LaunchOptions(
        size=size,
        command=(
            sys.executable,
            *(["-P"] if sys.flags.safe_path else []),  # holds for the ranks, as PYTHONSAFEPATH does
            *(["-m"] if arguments.module else []),
            *program,
        ),
        run_id=arguments.run_id or secrets.token_hex(8),
        threads=str(per_rank) if per_rank else threads_of(os.environ, len(cpus), size),
        cpus=tuple(sets),
        prefix=not arguments.no_prefix,
        log_dir=log_dir,
        tee=arguments.tee,
        grace=arguments.grace,
        elastic=elastic,
        min_ranks=arguments.min_ranks or 1,
        restarts=arguments.restart or 0,
        nodes=nodes,
    )


def _nodes(parser: argparse.ArgumentParser, arguments: argparse.Namespace, elastic: bool) -> NodeOptions | None:
    """The place of this node; None: the only one."""
    count, number = arguments.nodes, arguments.node_rank
    if number is not None and number >= count:
        parser.error(f"argument --node-rank: must be below the number of nodes, {count}, got {number}")
    if count == 1 and arguments.store is None:
        return None
    if arguments.store is None:
        parser.error("argument --nodes: needs --store, where node 0 hosts the store")
    if number is None and count > 1:
        parser.error("argument --nodes: needs --node-rank, the number of this node")
    if elastic:
        parser.error("arguments --elastic and --restart: a run on several nodes cannot go on without a rank")
    if arguments.master_port:
        parser.error("argument --master-port: the port is in --store")
    host, port = arguments.store
    return NodeOptions(number or 0, count, host, port)


def _host_to_listen_at(host: str) -> str:
    """All interfaces, since other hosts may resolve the name to another one than this host; loopback if it is named."""
    return loopback_address(host) or ("::" if socket.has_dualstack_ipv6() else "0.0.0.0")


def listen(host: str, port: int) -> socket.socket:
    """Claim the port before any rank starts; ranks that connect before the store takes over wait in the backlog.

    Not ``store.server.listen``, because that module imports torch.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(512)
    except OSError:
        sock.close()
        raise
    return sock


def threads_of(environ: Mapping[str, str], cpus: int, size: int) -> str:
    """The number of threads of each rank, OMP_NUM_THREADS."""
    return environ.get("OMP_NUM_THREADS") or str(max(1, cpus // size))


def _fail(parser: argparse.ArgumentParser, message: str) -> int:
    print(f"{parser.prog}: error: {message}", file=sys.stderr)
    return 1


def at_least_one(text: str) -> int:
    """The type of an argument."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, got {text!r}")
    return int(text)


def path_argument(text: str) -> Path:
    """The type of an argument."""
    if not text:  # for pathlib, the current folder
        raise argparse.ArgumentTypeError("must be a path, got ''")
    return Path(text)


def _number(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 0, got {text!r}")
    return int(text)


def _run_id(text: str) -> str:
    try:
        text.encode()  # keys of the store contain the id, as UTF-8
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"must be a text that UTF-8 can encode, got {text!r}") from None
    return text


def _address(text: str) -> tuple[str, int]:
    try:
        url = urlsplit(f"//{text}")
        host, port = url.hostname, url.port
        (host or "").encode("idna")  # as the resolver does
        beside = url.path.strip("/") or url.query or url.fragment or url.username is not None
    except ValueError:
        host = port = beside = None
    if not host or not port or beside:
        raise argparse.ArgumentTypeError(f"must be HOST:PORT, got {text!r}")
    return host, port


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"must be a port from 1 to 65535, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"must be seconds, at least 0, got {text!r}")
    return seconds
