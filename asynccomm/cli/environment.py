"""The environment of a rank: the variables that torchrun sets, and the number of threads. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import final

from asynccomm.core.exit_records import VARIABLE

NEWCOMER = "ASYNCCOMM_NEWCOMER"  # set for a rank that takes the place of a lost rank: the number of the restart


@final
@dataclass(frozen=True, slots=True)
class Placement:
    """The place of a rank in its run."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    port: int  #: of the store
    host: str = "127.0.0.1"  #: of the store
    node: int = 0
    nodes: int = 1


def rank_environment(
    base: Mapping[str, str], place: Placement, run_id: str, threads: str, exits: str, restart: int = 0
) -> dict[str, str]:
    """The environment of one rank: ``base`` and the variables that torchrun sets.

    Args:
        base: the launcher's own environment.
        run_id: distinguishes this run from others that use the same store.
        threads: OMP_NUM_THREADS.
        exits: the path of the launcher's exit records.
        restart: the number of the restart, for a rank that takes the place of a lost rank.
    """
    environment = {
        **base,
        "RANK": str(place.rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(place.size),
        "LOCAL_WORLD_SIZE": str(place.local_size),
        "GROUP_RANK": str(place.node),
        "GROUP_WORLD_SIZE": str(place.nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(place.rank),
        "ROLE_WORLD_SIZE": str(place.size),
        "MASTER_ADDR": place.host,
        "MASTER_PORT": str(place.port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": threads,
        VARIABLE: exits,
    }
    environment.pop(NEWCOMER, None)  # of a launcher that this one runs under
    return environment | ({NEWCOMER: str(restart)} if restart else {})


def cpu_sets(cpus: Collection[int], size: int, per_rank: int) -> list[frozenset[int]]:
    """``per_rank`` CPUs for each of ``size`` ranks, without overlap, in order of their numbers.

    Raises: ValueError with the number of CPUs, if there are too few.
    """
    if size * per_rank > len(cpus):
        raise ValueError(f"{size} ranks need {size * per_rank} CPUs of their own, {len(cpus)} are available")
    ordered = sorted(cpus)
    return [frozenset(ordered[rank * per_rank : (rank + 1) * per_rank]) for rank in range(size)]
