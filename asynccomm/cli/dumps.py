"""``asynccomm diagnose --dump DIR``: the flight recorders of a running job as files, one for each rank."""

from __future__ import annotations

import contextlib
import pickle
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asynccomm.core.files import write_whole
from asynccomm.observe.analysis import Dump, joined, unpacked

PREFIX = "rank_"  # of the files, as comm.flight has it


def dumps_of(answers: Sequence[Mapping[int, Mapping[str, Any]]]) -> dict[int, Dump]:
    """The dump of each process by its number, from the answers of the jobs of a run.

    Args:
        answers: by rank in the job, with an entry per comm key.
    """
    parts: dict[int, list[Dump]] = {}
    for job in answers:
        for comms in job.values():
            for answer in comms.values():
                with contextlib.suppress(ValueError, KeyError, TypeError, zlib.error):  # a malformed answer
                    parts.setdefault(int(answer["number"]), []).append(unpacked(answer["flight"]))
    return {number: joined(dumps) for number, dumps in sorted(parts.items()) if dumps}


def write_dumps(dumps: Mapping[int, Dump], directory: Path) -> list[Path]:
    """Write each process's dump; returns the files. Raises: OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for number, dump in dumps.items():
        path = directory / f"{PREFIX}{number}"
        write_whole(path, pickle.dumps(dump))
        paths.append(path)
    return paths
