"""``python -m tests.fuzz``: a differential fuzzer of everything that a Comm does. See ``--help``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path

from .campaign import BACKENDS, FEATURES, Campaign, run_one
from .fleet import Fleet
from .generate import PROFILES, generate
from .host import HOSTS
from .printing import printed
from .program import dumps, loads
from .shrink import SECONDS
from .worlds import TIMEOUT


def main() -> int:
    """Run a campaign; returns 1 if there are findings."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--backend", choices=BACKENDS, default="shm")
    parser.add_argument("--profile", choices=PROFILES, default="everything")
    parser.add_argument("--ranks", default="2,3", help="how many; several numbers take turns (default 2,3)")
    parser.add_argument("--seed", type=int, default=0, help="of the first program (default 0)")
    parser.add_argument("--cases", type=int, help="how many programs")
    parser.add_argument("--minutes", type=float, help="for how long, instead")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds for one operation; more is a hang")
    parser.add_argument("--hosts", help="the host of each rank, a letter, for hierarchical (default abba)")
    parser.add_argument("--shrink", type=float, default=SECONDS, help="seconds to shrink a program that fails; 0: none")
    parser.add_argument("--log", type=Path, help="a file for what is printed")
    parser.add_argument("--summary", type=Path, help="a file for the summary, which is printed otherwise")
    parser.add_argument(
        "--replay", type=Path, help="do the one program in this file of JSON, or that of --seed if it is -"
    )
    args = parser.parse_args()
    if args.hosts:
        os.environ[HOSTS] = args.hosts
    sizes = [int(size) for size in args.ranks.split(",")]
    if args.replay is not None:
        return replay(args.backend, args.profile, sizes[0], args.seed, args.replay, args.timeout)
    cases = args.cases if args.cases is not None or args.minutes is not None else 1000
    with ExitStack() as stack:
        log = stack.enter_context(args.log.open("a")) if args.log else None
        seconds = None if args.minutes is None else 60 * args.minutes
        campaign = Campaign(args.backend, args.profile, sizes, args.seed, cases, seconds, args.timeout)
        campaign.shrink_seconds, campaign.log = args.shrink, log
        campaign.out = lambda text: print(text, flush=True)
        summary = campaign.run()
    text = json.dumps(summary, indent=1)
    if args.summary is None:
        print(text)
    else:
        args.summary.write_text(text)
    return 1 if summary["findings"] else 0


def replay(backend: str, profile: str, size: int, seed: int, path: Path, timeout: float) -> int:
    """Do one program, and print its test."""
    features = FEATURES[backend]
    program = generate(profile, size, seed, features) if str(path) == "-" else loads(path.read_text())
    with Fleet(backend, program.size, timeout=timeout, with_torch=features.torch) as fleet:
        findings = run_one(fleet, program)
    print(dumps(program))
    print(printed(program, backend, findings))
    for finding in findings:
        print(finding)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
