"""``asynccomm diagnose --dump DIR``: the flight recorders of a running job as files, one for each rank."""

from __future__ import annotations

import contextlib
import os
import pickle
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asynccomm.observe.analysis import Dump, joined, unpacked

PREFIX = "rank_"  # of the files, as comm.flight has it


def dumps_of(answers: Sequence[Mapping[int, Mapping[str, Any]]]) -> dict[int, Dump]:
    """The dump of each rank, from the answers of the jobs of a run: by rank, with an entry per comm key."""
    parts: dict[int, list[Dump]] = {}
    for job in answers:
        for rank, comms in job.items():
            for answer in comms.values():
                with contextlib.suppress(ValueError, KeyError, TypeError, zlib.error):  # a malformed answer
                    parts.setdefault(rank, []).append(unpacked(answer["flight"]))
    return {rank: joined(dumps) for rank, dumps in sorted(parts.items()) if dumps}


def write_dumps(dumps: Mapping[int, Dump], directory: Path) -> list[Path]:
    """Write each rank's dump; returns the files. Raises: OSError."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for rank, dump in dumps.items():
        path = directory / f"{PREFIX}{rank}"
        new = path.with_name(f".{path.name}.new")
        new.write_bytes(pickle.dumps(dump))
        os.replace(new, path)
        paths.append(path)
    return paths
