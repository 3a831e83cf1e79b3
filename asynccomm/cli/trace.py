"""``asynccomm trace``: analyze the dumps of flight recorders, and merge the traces of ranks."""

from __future__ import annotations

import argparse
import json

from asynccomm.cli.run import Commands, path_argument
from asynccomm.observe.analysis import DumpError, analyze, dump_files, load_dump
from asynccomm.observe.chrome import read_parts, write_trace

_DESCRIPTION = """\
Analyze the dumps of flight recorders, and merge the traces of ranks.

    asynccomm trace analyze DUMPS...     files or folders, one file for each rank with its number at the end
    asynccomm trace merge FILES... --out OUT.json

analyze names the first collective of each comm that some ranks did not call, called differently or did not complete,
and the rank that was last most of the times. The exit code is 1 if there is such a collective, 0 if there is none, and
2 if there is no dump or a file is damaged. merge makes one trace for Perfetto of the files of ranks, as
`with comm.trace(...)` writes them.
"""


def add_command(commands: Commands) -> None:
    """Register ``trace`` with the command line."""
    parser = commands.add_parser(
        "trace",
        help="analyze the dumps of flight recorders",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="asynccomm trace {analyze,merge} FILES... [options]",
    )
    parser.add_argument("action", choices=["analyze", "merge"], help="what to do with the files")
    parser.add_argument("places", nargs="+", type=path_argument, metavar="FILES", help="files, or folders of dumps")
    parser.add_argument("--json", action="store_true", help="analyze: print it for machines")
    parser.add_argument("--out", type=path_argument, metavar="OUT.json", help="merge: the file to write")
    parser.set_defaults(command=lambda arguments: _trace(parser, arguments), parser=parser)


def _trace(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.action == "merge":
        return _merge(parser, arguments)
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


def _merge(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    if arguments.out is None:
        parser.error("argument --out: merge needs the file to write")
    try:
        write_trace(arguments.out, read_parts(arguments.places))
    except (OSError, ValueError) as exc:
        parser.error(str(exc))
    return 0
