"""The variables of launchers; Open MPI's own is in tests/many_hosts/test_starting.py."""

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from asynccomm.rendezvous.launchers import (
    FIRST_PORT,
    LAUNCHERS,
    MPICH,
    OPEN_MPI,
    PORTS,
    SLURM,
    first_node,
    job_name,
    launcher_of,
    on_one_host,
    process_number,
    slurm_address,
    started_by,
)
from asynccomm.rendezvous.spec import resolve_spec

TASK = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_JOB_ID": "123456",
    "SLURM_JOB_NODELIST": "gpu[07-08]",
}
OMPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
PMI2 = {"PMI_RANK": "3", "PMI_SIZE": "8", "PMI_FD": "9", "PMI_JOBID": "123456.0"}  # by srun --mpi=pmi2, beside TASK
TORCHRUN = {"RANK": "5", "WORLD_SIZE": "6", "MASTER_ADDR": "h", "MASTER_PORT": "1"}


def test_ranks_of_srun_meet_at_the_first_host_of_the_list() -> None:
    found = resolve_spec(None, None, None, TASK)
    assert (found.rank, found.size, found.host, found.hosting) == (3, 8, "gpu07", False)
    assert resolve_spec(None, None, None, TASK | {"SLURM_PROCID": "0"}).hosting


def test_ranks_of_srun_with_pmi2_meet_as_without_it() -> None:
    assert resolve_spec(None, None, None, TASK | PMI2) == resolve_spec(None, None, None, TASK)


def test_the_port_of_a_job_follows_from_its_ids() -> None:
    def port(job: str, step: str = "") -> int:
        found = slurm_address(TASK | {"SLURM_JOB_ID": job} | ({"SLURM_STEP_ID": step} if step else {}))
        assert found is not None
        return found[1]

    assert port("123456") == port("123456", "0") == FIRST_PORT + 123456 % PORTS
    neighbours = {port(str(job), str(step)) for job in range(100, 200) for step in range(9)}
    assert len(neighbours) == 900
    assert all(FIRST_PORT <= each < 32768 for each in neighbours)


def test_a_step_has_its_own_size_and_hosts() -> None:
    step = {"SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu08"}
    found = resolve_spec(None, None, None, TASK | step)
    assert (found.size, found.host) == (4, "gpu08")


@pytest.mark.parametrize("variable", ["MASTER_ADDR", "MASTER_PORT"])
def test_a_master_that_is_set_is_kept(variable: str) -> None:
    found = resolve_spec(None, None, None, TASK | {variable: "777"})
    assert (found.host, found.port) == (
        ("777", FIRST_PORT + 123456 % PORTS) if variable == "MASTER_ADDR" else ("gpu07", 777)
    )


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu07", "gpu07"),
        ("gpu07,gpu09", "gpu07"),
        ("gpu[07-09,12]", "gpu07"),
        ("gpu[12,07-09],login", "gpu12"),
        ("rack[3-4]node[01-16]", "rack3node01"),
        ("r1-n[5]-ib", "r1-n5-ib"),
        ("node1.example.org,node2", "node1.example.org"),
    ],
)
def test_the_first_host_of_a_list(nodes: str, first: str) -> None:
    assert first_node("SLURM_JOB_NODELIST", nodes) == first


@pytest.mark.parametrize("nodes", [",gpu07", "gpu[", "gpu]07", "gpu 07", "[]"])
def test_a_malformed_list_is_named(nodes: str) -> None:
    with pytest.raises(ValueError, match="environment variable SLURM_JOB_NODELIST must be a list of hosts, got"):
        first_node("SLURM_JOB_NODELIST", nodes)


@pytest.mark.parametrize(
    ("environ", "launcher"),
    [
        ({}, None),
        (TASK, SLURM),
        (OMPI, OPEN_MPI),
        (HYDRA, MPICH),
        (TASK | OMPI, OPEN_MPI),  # mpirun in a job of SLURM: its daemons are tasks of srun
        (TASK | HYDRA, MPICH),
        (TASK | PMI2, SLURM),
        (TASK | PMI2 | {"SLURM_STEP_NUM_TASKS": "4", "PMI_SIZE": "4"}, SLURM),
        (TASK | PMI2 | HYDRA, MPICH),
        (TASK | PMI2 | HYDRA | {"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, MPICH),  # a rank on each host
        (TASK | PMI2 | OMPI, OPEN_MPI),
        (TASK | PMI2 | TORCHRUN, None),
        (PMI2, MPICH),
        (OMPI | HYDRA, OPEN_MPI),
        (TASK | TORCHRUN, None),  # torchrun, started by srun on each host
        (OMPI | {"RANK": "0"}, None),
    ],
)
def test_the_innermost_launcher_counts(environ: Mapping[str, str], launcher: object) -> None:
    assert launcher_of(environ) is launcher


def test_two_mpi_launchers_that_contradict_each_other_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"OMPI_COMM_WORLD_RANK=1 contradicts PMI_RANK=0; set RANK and WORLD_SIZE"):
        launcher_of(OMPI | HYDRA | {"PMI_RANK": "0"})
    with pytest.raises(ValueError, match="OMPI_COMM_WORLD_SIZE=2 contradicts PMI_SIZE=4"):
        launcher_of(OMPI | HYDRA | {"PMI_SIZE": "4"})


def test_the_variables_of_torchrun_win() -> None:
    found = resolve_spec(None, None, None, TASK | OMPI | TORCHRUN)
    assert (found.rank, found.size, found.host, found.port, found.meeting) == (5, 6, "h", 1, "")


def test_a_half_of_torchruns_variables_is_not_completed_by_another_launcher() -> None:
    with pytest.raises(ValueError, match="environment variable WORLD_SIZE is not set"):
        resolve_spec(None, None, None, OMPI | {"RANK": "0"})


@pytest.mark.parametrize("environ", [OMPI, HYDRA])
def test_ranks_of_mpi_on_one_host_meet_at_a_socket_of_it(environ: Mapping[str, str]) -> None:
    found = resolve_spec(None, None, None, environ)
    assert (found.rank, found.size, found.port) == (1, 2, 0)
    assert found.meeting.startswith(f"asynccomm-meeting/{os.geteuid()}/")
    assert found == resolve_spec(None, None, None, environ)
    assert on_one_host(OPEN_MPI, OMPI)
    assert on_one_host(MPICH, HYDRA)


@pytest.mark.parametrize(
    ("environ", "flags"),
    [
        (
            OMPI | {"OMPI_COMM_WORLD_SIZE": "4"},
            "mpirun does not set it .* -x MASTER_ADDR=host -x MASTER_PORT=29500",
        ),
        (HYDRA | {"PMI_SIZE": "4"}, "mpiexec does not set it for .* -genv MASTER_ADDR host -genv MASTER_PORT 29500"),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, "-genv MASTER_ADDR host"),  # it may be on several hosts
    ],
)
def test_ranks_of_mpi_on_several_hosts_are_told_what_to_set(environ: Mapping[str, str], flags: str) -> None:
    with pytest.raises(ValueError, match=f"environment variable MASTER_ADDR is not set, and .*{flags}"):
        resolve_spec(None, None, None, environ)
    found = resolve_spec(None, None, None, environ | {"MASTER_ADDR": "h", "MASTER_PORT": "1"})
    assert (found.rank, found.host, found.port) == (1, "h", 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SLURM_PROCID": "x"}, "environment variable SLURM_PROCID must be an integer, got 'x'"),
        ({"SLURM_PROCID": "8"}, r"environment variable SLURM_PROCID must be in \[0, 8\), got 8"),
        ({"SLURM_NTASKS": ""}, "environment variable SLURM_STEP_NUM_TASKS is not set"),
        ({"SLURM_JOB_ID": "x"}, "environment variable SLURM_JOB_ID must be a number, got 'x'"),
        (
            {"SLURM_JOB_ID": ""},
            r"environment variable MASTER_ADDR is not set, .* SLURM_JOB_ID with .*, got '' and 'gpu\[07-08\]'",
        ),
        (
            {"SLURM_JOB_NODELIST": ""},
            r"environment variable MASTER_ADDR .* SLURM_STEP_NODELIST or SLURM_JOB_NODELIST, got '123456' and ''",
        ),
    ],
)
def test_the_variable_of_the_launcher_is_named(change: Mapping[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        resolve_spec(None, None, None, TASK | change)


def test_a_launcher_is_found_beside_a_rank_of_torchruns() -> None:
    assert started_by(OMPI | TORCHRUN) is OPEN_MPI


@pytest.mark.parametrize(
    ("environ", "number"),
    [({}, 77), (OMPI, 1), (OMPI | {"RANK": "5"}, 5), ({"RANK": "none"}, 77)],
)
def test_the_number_of_a_process_is_its_launchers_rank(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], number: int
) -> None:
    for each in ("RANK", *(launcher.rank for launcher in LAUNCHERS)):
        monkeypatch.delenv(each, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert process_number(77) == number


def test_the_name_of_a_job_is_that_of_the_process_that_started_its_ranks(tmp_path: Path) -> None:
    """mpirun (10) starts a daemon (11), that starts a shell for each rank (20 and 30)."""

    def process(pid: int, parent: int, environ: bytes | None) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        fields = ["S", str(parent), *["0"] * 17, f"{pid}000", "0"]
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a (b) c) {' '.join(fields)}\n")
        if environ is not None:
            (tmp_path / str(pid) / "environ").write_bytes(environ)

    for pid, parent, environ in [
        (10, 1, b"PATH=/bin\0"),
        (11, 10, b"PATH=/bin\0XPMI_RANK=2\0"),
        (20, 11, b"PMI_RANK=0\0PMI_SIZE=2\0"),
        (30, 11, b"PMI_SIZE=2\0PMI_RANK=1\0"),
    ]:
        process(pid, parent, environ)
    names = []
    for shell in (20, 30):
        process(os.getpid(), shell, b"")
        names.append(job_name(MPICH, tmp_path))
    assert names == ["11-11000"] * 2
    process(os.getpid(), 40, b"")
    process(40, 11, None)  # of another user
    assert job_name(MPICH, tmp_path) == "40-40000"
