"""``asynccomm trace``: analyze the dumps of flight recorders, and merge the traces of ranks."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from asynccomm.cli.run import Commands
from asynccomm.observe.analysis import DumpError, analyze, dump_files, load_dump

_DESCRIPTION = """\
Analyze the dumps of flight recorders.

    asynccomm trace analyze DUMPS...     files or folders, one file for each rank with its number at the end

Names the first collective of each comm that some ranks did not call, called differently or did not complete, and the
rank that was last most of the times. The exit code is 1 if there is such a collective, 0 if there is none, and 2 if
there is no dump.
"""


def add_command(commands: Commands) -> None:
    """Register ``trace`` with the command line."""
    parser = commands.add_parser(
        "trace",
        help="analyze the dumps of flight recorders",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="asynccomm trace analyze DUMPS... [options]",
    )
    parser.add_argument("action", choices=["analyze"], help="analyze: name the first collective that does not match")
    parser.add_argument("places", nargs="+", type=Path, metavar="DUMPS", help="files or folders")
    parser.add_argument("--json", action="store_true", help="print it for machines")
    parser.set_defaults(command=lambda arguments: _trace(parser, arguments), parser=parser)


def _trace(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    try:
        files = dump_files(arguments.places)
        found = analyze({rank: load_dump(path) for rank, path in files.items()})
    except (OSError, DumpError) as exc:
        parser.error(str(exc))
    if arguments.json:
        print(json.dumps([each.as_json() for each in found], indent=2))
    else:
        print("\n\n".join(map(str, found)))
    return int(any(each.suspect is not None for each in found))
