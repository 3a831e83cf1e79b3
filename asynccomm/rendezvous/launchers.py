"""Ranks that SLURM's srun, Open MPI's or MPICH's launcher started, by the variables that these set.

The variables of torchrun, which ``asynccomm run`` sets, too, come first: RANK and WORLD_SIZE, MASTER_ADDR and
MASTER_PORT. Each pair that is missing is taken from the launcher:

    launcher      rank, size                                     where the ranks meet
    Open MPI      OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE     a socket of this host; on several hosts: MASTER_ADDR
    MPICH, Intel  PMI_RANK, PMI_SIZE                             and MASTER_PORT must be set
    SLURM         SLURM_PROCID, SLURM_STEP_NUM_TASKS or          the first host of the step's list, a port that follows
                  SLURM_NTASKS                                   from the ids of job and step

The order matters: an MPI launcher inside a SLURM job starts its daemons by srun, and its ranks inherit their variables.
Srun with ``--mpi=pmi2`` sets the variables of MPICH, too, to the same numbers as its own, but not MPI_LOCALNRANKS.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

FIRST_PORT: Final = 10000  # of the ports that follow from a job's id; all are below the ephemeral ones
PORTS: Final = 20000

_STEP_PRIME: Final = 977  # so that the steps of one job use ports apart from those of the next jobs
_FIRST: Final = re.compile(r"((?:[A-Za-z0-9_.:-]+|\[[0-9][0-9,-]*\])+)(?:,|$)")  # the first entry of a node list
_RANGES: Final = re.compile(r"\[([0-9]+)[0-9,-]*\]")


@final
@dataclass(frozen=True, slots=True)
class Launcher:
    """The variables of one launcher."""

    name: str
    rank: str
    sizes: tuple[str, ...]  #: the first that is set
    local_size: str = ""  #: ranks on this host
    flags: str = ""  #: the options of its command that set a variable

    def size(self, environ: Mapping[str, str]) -> str:
        """The variable with the number of ranks."""
        return next((name for name in self.sizes if environ.get(name)), self.sizes[0])


OPEN_MPI: Final = Launcher(
    "Open MPI's mpirun",
    "OMPI_COMM_WORLD_RANK",
    ("OMPI_COMM_WORLD_SIZE",),
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "-x MASTER_ADDR=host -x MASTER_PORT=29500",
)
MPICH: Final = Launcher(
    "MPICH's mpiexec",
    "PMI_RANK",
    ("PMI_SIZE",),
    "MPI_LOCALNRANKS",
    "-genv MASTER_ADDR host -genv MASTER_PORT 29500",
)
SLURM: Final = Launcher("srun", "SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))

LAUNCHERS: Final = (OPEN_MPI, MPICH, SLURM)


def launcher_of(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher that started this process, if RANK and WORLD_SIZE do not say its place already.

    Raises: ValueError if two MPI launchers contradict each other.
    """
    if environ.get("RANK") or environ.get("WORLD_SIZE"):
        return None
    if environ.get(OPEN_MPI.rank) and environ.get(MPICH.rank) and not _pmi_of_slurm(environ):
        for one, other in ((OPEN_MPI.rank, MPICH.rank), (OPEN_MPI.size(environ), MPICH.size(environ))):
            if environ.get(one) != environ.get(other):
                raise ValueError(
                    f"environment variable {one}={environ.get(one)} contradicts {other}={environ.get(other)}; "
                    "set RANK and WORLD_SIZE"
                )
    return started_by(environ)


def started_by(environ: Mapping[str, str]) -> Launcher | None:
    """The launcher to name in an error, and to ask for the place of the store; also where RANK is set."""
    launchers = (OPEN_MPI, SLURM) if _pmi_of_slurm(environ) else LAUNCHERS
    return next((each for each in launchers if environ.get(each.rank)), None)


def process_number(otherwise: int) -> int:
    """The number of this process in dumps and traces, the same for all its comms: the launcher's rank, if it has one.

    Comms count their ranks anew, those that replace another comm, too. Processes may have inherited the variables of
    one rank: a comm in which two have the same number takes its own ranks instead (``handshake``).
    """
    launcher = started_by(os.environ)
    rank = os.environ.get("RANK") or ("" if launcher is None else os.environ[launcher.rank])
    return int(rank) if rank.isdecimal() else otherwise


def _pmi_of_slurm(environ: Mapping[str, str]) -> bool:
    """Whether srun has set the variables of MPICH for its own task."""
    places = [[environ.get(each.rank), environ.get(each.size(environ))] for each in (MPICH, SLURM)]
    return not environ.get(MPICH.local_size) and all(places[1]) and places[0] == places[1]


def slurm_address(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """The host and the port where the ranks of a step of SLURM meet; None if its variables are not set.

    Raises: ValueError naming a variable with a malformed value.
    """
    name = "SLURM_STEP_NODELIST" if environ.get("SLURM_STEP_NODELIST") else "SLURM_JOB_NODELIST"
    nodes, job = environ.get(name, ""), environ.get("SLURM_JOB_ID", "")
    if not nodes or not job:
        return None
    step = environ.get("SLURM_STEP_ID") or "0"
    for variable, text in (("SLURM_JOB_ID", job), ("SLURM_STEP_ID", step)):
        if not text.isdecimal():
            raise ValueError(f"environment variable {variable} must be a number, got {text!r}")
    port = FIRST_PORT + (int(job) + _STEP_PRIME * int(step)) % PORTS
    return first_node(name, nodes), port


def first_node(name: str, nodes: str) -> str:
    """The first host of a node list such as ``gpu[07-09,12],login``. Raises: ValueError naming variable ``name``."""
    found = _FIRST.match(nodes)
    if found is None:
        raise ValueError(f"environment variable {name} must be a list of hosts, got {nodes!r}")
    return _RANGES.sub(lambda ranges: ranges[1], found[1])


def on_one_host(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    """Whether an MPI launcher started all its ranks on this host."""
    local = environ.get(launcher.local_size)
    return bool(local) and local == environ.get(launcher.size(environ))


def job_name(launcher: Launcher, proc: Path = Path("/proc")) -> str:
    """A name that all ranks of this MPI job on this host have, and no other job: from the process that started them.

    That is the nearest ancestor without a rank in its environment: between it and a rank there may be shells. An
    environment that cannot be read is of another user, and so of no rank.
    """
    pid = os.getpid()
    wanted = f"{launcher.rank}=".encode()
    while True:
        status = (proc / str(pid) / "stat").read_text().rpartition(")")[2].split()
        parent, started = int(status[1]), status[19]
        if pid != os.getpid():
            try:
                environment = (proc / str(pid) / "environ").read_bytes()
            except OSError:
                environment = b""
            if parent == 0 or not any(each.startswith(wanted) for each in environment.split(b"\0")):
                return f"{pid}-{started}"
        pid = parent
