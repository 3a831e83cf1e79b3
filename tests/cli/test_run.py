"""The command line: what it accepts, what it refuses, and what ranks are told."""

import ast
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from asynccomm.cli.main import main

SHOW = "import os, sys; print([dict(os.environ), sys.argv[1:], sorted(os.sched_getaffinity(0))], flush=True)"

TORCHRUN = {
    "LOCAL_WORLD_SIZE": "2",
    "WORLD_SIZE": "2",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_NAME": "default",
    "ROLE_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "0",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "PYTHONUNBUFFERED": "1",
}


def shown(out: str) -> dict[int, list]:
    """What SHOW printed, by rank."""
    return {int(line[1]): ast.literal_eval(line[4:]) for line in out.splitlines()}


def test_variables(launcher) -> None:
    script = launcher.script(SHOW)
    code, out, _ = launcher.run("run", "-n", "2", "--run-id", "mine", script, environment={"OWN": "kept"})
    assert code == 0
    ranks = shown(out)
    assert sorted(ranks) == [0, 1]
    for rank, (environment, _, _) in ranks.items():
        own = dict.fromkeys(("RANK", "LOCAL_RANK", "ROLE_RANK"), str(rank))
        expected = TORCHRUN | own | {"TORCHELASTIC_RUN_ID": "mine", "OWN": "kept"}
        assert {name: environment.get(name) for name in expected} == expected
    assert len({environment["MASTER_PORT"] for environment, _, _ in ranks.values()}) == 1


def test_run_ids_differ(launcher) -> None:
    script = launcher.script("import os; print(os.environ['TORCHELASTIC_RUN_ID'])")
    assert launcher.run("run", "-n", "1", script)[1] != launcher.run("run", "-n", "1", script)[1]


def test_script_arguments_are_left_alone(launcher) -> None:
    given = ["-n", "7", "--tee", "--", "-x", "a b", ""]
    ranks = shown(launcher.run("run", "-n", "1", launcher.script(SHOW), *given)[1])
    assert ranks[0][1] == given


def test_module(launcher) -> None:
    (launcher.directory / "package").mkdir()
    launcher.script("", "package/__init__.py")
    launcher.script("import sys; print(__name__, __package__, sys.argv[1:])", "package/train.py")
    code, out, _ = launcher.run("run", "-n", "1", "-m", "package.train", "--lr", "1")
    assert (code, out) == (0, "[0] __main__ package ['--lr', '1']\n")


@pytest.mark.parametrize("given", [["--", "b"], ["a", "--", "b"], ["-n", "2", "--tee"]])
def test_arguments_of_the_script_are_given_as_they_are(launcher, given: list[str]) -> None:
    script = launcher.script("import sys; print(sys.argv[1:])")
    for place in ([script], ["--", script]):
        assert launcher.run("run", "-n", "1", *place, *given)[:2] == (0, f"[0] {given}\n")


def test_threads_share_the_cpus(launcher) -> None:
    cpus = len(os.sched_getaffinity(0))
    for size in (1, cpus + 1):
        ranks = shown(launcher.run("run", "-n", str(size), launcher.script(SHOW))[1])
        assert {environment["OMP_NUM_THREADS"] for environment, _, _ in ranks.values()} == {str(max(1, cpus // size))}


def test_threads_that_the_user_set_are_kept(launcher) -> None:
    out = launcher.run("run", "-n", "1", launcher.script(SHOW), environment={"OMP_NUM_THREADS": "5"})[1]
    assert shown(out)[0][0]["OMP_NUM_THREADS"] == "5"


def test_cpus_per_rank(launcher) -> None:
    size = min(2, len(os.sched_getaffinity(0)))
    arguments = ("run", "-n", str(size), "--cpus-per-rank", "1", launcher.script(SHOW))
    ranks = shown(launcher.run(*arguments, environment={"OMP_NUM_THREADS": "5"})[1])
    assert sorted(cpu for _, _, cpus in ranks.values() for cpu in cpus) == sorted(os.sched_getaffinity(0))[:size]
    assert {environment["OMP_NUM_THREADS"] for environment, _, _ in ranks.values()} == {"1"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-n", "0", "script.py"], "argument -n/--ranks: must be a whole number, at least 1, got '0'"),
        (["-n", "two", "script.py"], "argument -n/--ranks: must be a whole number, at least 1, got 'two'"),
        ([], "arguments are required: -n/--ranks, SCRIPT\n"),
        (["script.py"], "arguments are required: -n/--ranks"),
        (["-n", "1"], "arguments are required: SCRIPT"),
        (["-n", "1", "--"], "arguments are required: SCRIPT"),
        (["-n", "1", "--bogus", "script.py"], "unrecognized arguments: --bogus"),
        (["-n", "1", "missing.py"], "argument SCRIPT: 'missing.py' does not exist"),
        (["-n", "1", "--master-port", "70000", "script.py"], "argument --master-port: must be a port"),
        (
            ["-n", "1", "--run-id", "a\nb\udcff", "script.py"],
            r"argument --run-id: must be a text that UTF-8 can encode, got 'a\nb\udcff'",
        ),
        (["-n", "1", "--store", "a..b:29500", "script.py"], "argument --store: must be HOST:PORT, got 'a..b:29500'"),
        *(
            (["-n", "1", "--store", store, "script.py"], f"argument --store: must be HOST:PORT, got {store!r}")
            for store in ("head:29500/abc", "me@head:29500", "head:29500?x", "head:29500#f")
        ),
        (["-n", "1", "--grace", "soon", "script.py"], "argument --grace: must be seconds, at least 0, got 'soon'"),
        (["-n", "2", "--min-ranks", "2", "script.py"], "argument --min-ranks: needs --elastic"),
        (
            ["-n", "2", "--elastic", "--min-ranks", "3", "script.py"],
            "argument --min-ranks: must be at most the number of ranks, 2, got 3",
        ),
        (["-n", "2", "--restart", "0", "script.py"], "argument --restart: must be a whole number, at least 1, got '0'"),
        (["-n", "1", "--tee", "script.py"], "argument --tee: needs --log-dir"),
        (["-n", "1", "--log-dir", "/dev/null/logs", "script.py"], "argument --log-dir: cannot make '/dev/null/logs'"),
        (["-n", "1", "--cpus-per-rank", "4096", "script.py"], "argument --cpus-per-rank: 4096: 1 ranks need 4096 CPUs"),
    ],
)
def test_bad_input_is_named_and_starts_nothing(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "script.py").write_text("open('started', 'w')")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as exited:
        main(["run", *arguments])
    assert exited.value.code == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["run", "-n", "1", "--log-dir=", "script.py"], "--log-dir"),
        (["run", "-n", "1", "--trace=", "script.py"], "--trace"),
        (["trace", "merge", "rank0.json", "--out="], "--out"),
        (["trace", "analyze", ""], "FILES"),
        (["diagnose", "--dump="], "--dump"),
        (["bench", "--json="], "--json"),
        (["bench", "--plot="], "--plot"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exited:
        main(arguments)
    assert exited.value.code == 2
    assert capsys.readouterr().err.endswith(f"error: argument {name}: must be a path, got ''\n")


def test_port_in_use_is_named(launcher) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        code, _, err = launcher.run("run", "-n", "1", "--master-port", str(port), launcher.script(SHOW))
    assert code == 2
    assert f"argument --master-port: cannot listen at 127.0.0.1:{port}: Address already in use" in err


def test_master_port_is_claimed_before_ranks_start(launcher) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = launcher.script(
        """
        import os, socket
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))):
            print("at", os.environ["MASTER_PORT"])
        """
    )
    assert launcher.run("run", "-n", "1", "--master-port", str(port), script)[:2] == (0, f"[0] at {port}\n")


def test_the_store_listens_at_the_loopback_address_that_is_given(launcher, unused_tcp_port: int) -> None:
    script = launcher.script(
        """
        import os, socket
        with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) as at:
            print("at", at.getpeername()[0])
        """
    )
    place = ["--store", f"127.0.0.2:{unused_tcp_port}"]
    assert launcher.run("run", "-n", "1", *place, script)[:2] == (0, "[0] at 127.0.0.2\n")


COLLECTIVE = """
    import os
    import asynccomm, torch

    async def main():
        async with asynccomm.new_comm(timeout=60) as comm:
            tensor = torch.full((4,), comm.rank + 1.0)
            await comm.all_reduce(tensor)
            with open(f"rank{os.environ['RANK']}", "w") as file:
                print(comm.rank, comm.size, tensor.tolist(), file=file)

    asynccomm.run(main())
"""


def test_the_same_script_runs_here_and_under_torchrun(launcher) -> None:
    def results() -> list[str]:
        texts = [path.read_text() for path in sorted(launcher.directory.glob("rank?"))]
        for path in launcher.directory.glob("rank?"):
            path.unlink()
        return texts

    script = launcher.script(COLLECTIVE)
    code, _, err = launcher.run("run", "-n", "2", script)
    assert code == 0, err
    assert results() == [f"{rank} 2 [3.0, 3.0, 3.0, 3.0]\n" for rank in range(2)]
    # --standalone is for the port only: without it torchrun takes 29500, free or not
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script]
    theirs = subprocess.run(command, cwd=launcher.directory, capture_output=True, text=True, timeout=100)
    assert theirs.returncode == 0, theirs.stderr
    assert results() == [f"{rank} 2 [3.0, 3.0, 3.0, 3.0]\n" for rank in range(2)]
