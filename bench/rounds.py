"""The arguments and the start of every bench of rounds; ``asynccomm.benchmarks.rounds`` measures."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from asynccomm.benchmarks.rounds import ROUNDS, Body, in_turns, timed

__all__ = ["ROUNDS", "Body", "arguments", "in_turns", "start_ranks", "timed"]


def arguments(parser: argparse.ArgumentParser, sizes: Sequence[int] | None = None) -> None:
    """Add what every bench of rounds takes; None: each case has sizes of its own."""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--sizes", type=lambda text: [int(s) for s in text.split(",")], default=sizes, help="in bytes")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--json", help="file to write the rows to")


def start_ranks(ranks: int) -> None:
    """Become the launcher of the running file as ``ranks`` processes; in one of those, do nothing.

    The launcher takes this process's place: a signal that should end the bench ends the ranks.
    """
    if "RANK" not in os.environ:
        command = [sys.executable, "-m", "asynccomm.cli.main", "run", "-n", str(ranks), "--no-prefix", *sys.argv]
        os.execv(sys.executable, command)
