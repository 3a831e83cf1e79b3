"""The benches run, and refuse what they cannot do. Their figures are nobody's test."""

import json
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from asynccomm.benchmarks.mpi_launcher import why_not
from asynccomm.benchmarks.operations import OPS
from tests.sampling import some

ROOT = Path(__file__).parents[2]


def bench(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT / "bench", capture_output=True, text=True, timeout=100, check=False)


def test_collectives_writes_a_row_per_operation_and_peer(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    peers = ["gloo", *(["mpi"] if why_not() is None else [])]
    done = bench(
        "collectives.py",
        *("--backend", "gloo"),
        *("--ops", "all_reduce,barrier"),
        *("--sizes", 8),
        *("--peers", ",".join(peers)),
        *("--rounds", 1),
        "--json",
        out,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [(row["op"], row["bytes"], row["peer"]) for row in rows] == [
        (op, nbytes, peer) for op, nbytes in (("all_reduce", 8), ("barrier", 0)) for peer in peers
    ]
    assert all(row["ratio"] == pytest.approx(row["peer_us"] / row["asynccomm_us"]) for row in rows)


@pytest.mark.parametrize("backend", some(["shm", "gloo"], 1))
def test_windows_writes_a_row_per_size_and_peer(tmp_path: Path, backend: str) -> None:
    out = tmp_path / "rows.json"
    mpi = ["--mpi"] if backend == "shm" and why_not() is None else []
    done = bench("windows.py", "--backend", backend, "--sizes", "8,4096", "--rounds", 1, *mpi, "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    peers = ["send and recv", *(["MPI's Put and flush"] if mpi else []), "memcpy"]
    assert [(row["bytes"], row["peer"]) for row in rows] == [(size, peer) for size in (8, 4096) for peer in peers]
    assert all(row["asynccomm_us"] > 0 and row["peer_us"] > 0 for row in rows)


def test_shared_tensors_writes_a_row_per_size_and_collective(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    sizes = some(["8", "300000"], 1)
    done = bench("shared_tensors.py", "--sizes", ",".join(sizes), "--rounds", 1, "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert len(rows) == 5 * len(sizes)
    assert all(row["asynccomm_us"] > 0 and row["peer_us"] > 0 for row in rows)


def test_what_was_measured_outlives_an_interruption(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    command = [sys.executable, "collectives.py", "--backend", "gloo", "--sizes", "8", "--peers", "gloo"]
    with subprocess.Popen([*command, "--json", str(out)], cwd=ROOT / "bench", stdout=subprocess.DEVNULL) as running:
        end = time.monotonic() + 60
        while not out.exists() and running.poll() is None and time.monotonic() < end:
            time.sleep(0.01)
        running.send_signal(signal.SIGTERM)
        assert running.wait(20) != 0
    found = [row["op"] for row in json.loads(out.read_text())]
    assert 1 <= len(found) < len(OPS)
    assert found == list(OPS)[: len(found)]


@pytest.mark.exhaustive
def test_hints_has_a_column_per_value(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = bench(
        "hints.py",
        *("--backend", "gloo"),
        *("--hint", "gloo_threads=1,2"),
        *("--sizes", 8),
        *("--rounds", 1),
        "--json",
        out,
    )
    assert done.returncode == 0, done.stderr
    assert [(row["hint"], row["value"]) for row in json.loads(out.read_text())] == [
        ("gloo_threads", "1"),
        ("gloo_threads", "2"),
    ]


@pytest.mark.exhaustive
def test_overheads_compares_each_setting_with_nothing_on(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = bench("overheads.py", "--sizes", 8, "--rounds", 1, "--json", out)
    assert done.returncode == 0, done.stderr
    rows = {row["setting"]: row for row in json.loads(out.read_text())}
    assert rows.keys() == {"small recorder", "off", "recorder", "unread events", "events", "metrics", "trace", "hook"}
    assert rows["off"]["more_us"] == 0


def test_loop_lag_measures_each_setting_with_and_without_communication(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = bench(
        "loop_lag.py", *("--backend", "gloo"), *("--bytes", 4096), *("--seconds", 0.03), *("--late", 0.1), "--json", out
    )
    assert done.returncode == 0, done.stderr
    *lags, late = json.loads(out.read_text())
    assert [(row["case"], row["communicating"]) for row in lags] == [
        (case, communicating) for case in ("idle loop", "busy loop", "GIL-bound") for communicating in (False, True)
    ]
    assert late["case"] == "late peer"


def test_forms_has_a_row_per_form_and_size(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = bench("forms.py", *("--sizes", 2048), *("--rounds", 1), "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert len({row["form"] for row in rows}) == len(rows) == 13
    assert all(row["times"] == pytest.approx(row["form_us"] / row["plain_us"]) for row in rows)


def test_completion_measures_latency_wake_ups_and_cpu(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = bench(
        "completion.py",
        *("--delays", "20,200"),
        *("--rounds", 1),
        *("--late", 0.1),
        *("--loop", "asyncio"),
        "--json",
        out,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    contenders = ["poller", "thread only", "executor", "sleep"]
    assert [(row["delay_us"], row["contender"]) for row in rows if "delay_us" in row] == [
        (delay, contender) for delay in (20, 200) for contender in contenders
    ]
    assert [row["works"] for row in rows if "works" in row] == [100]
    assert [(row["contender"], row["in_flight"]) for row in rows if "cpu_percent" in row] == [
        (contender, in_flight) for contender in contenders for in_flight in (False, True)
    ]


def test_agreed_simulates_each_number_of_ranks(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = bench("agreed.py", *("--simulate", "1,3"), *("--ops", 5), *("--rounds", 1), "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [(row["ranks"], row["ops"], row["messages_per_op"]) for row in rows] == [(1, 5, 0.4), (3, 5, 0.4)]
    assert all(0 < row["council_us_per_op"] * row["ranks"] * 5 == pytest.approx(row["council_us"]) for row in rows)
    assert all(0 < row["announcement_bytes"] <= 6 and row["decision_bytes"] <= 6 for row in rows)


def test_scale_simulates_each_protocol(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = bench("scale.py", *("--ranks", "10,40"), *("--per-host", 4), "--json", out)
    assert done.returncode == 0, done.stderr
    rows = {(row["protocol"], row["ranks"]): row for row in json.loads(out.read_text())}
    protocols = {protocol for protocol, _ in rows}
    assert len(protocols) == 11
    for protocol in protocols:
        small, large = rows[protocol, 10], rows[protocol, 40]
        assert (small["hosts"], large["hosts"]) == (3, 10)
        assert large["each"] < 4 * max(small["each"], 1), "what a rank does hardly grows with the number of ranks"
    for protocol in ("shrink, CPU", "all close a comm", "agreed ordering, CPU"):
        small, large = rows[protocol, 10], rows[protocol, 40]
        assert large["nbytes"] < 2 * small["nbytes"], "no rank receives a list with an entry for each rank"
    assert all(row["ms"] > 0 for row in rows.values())


def test_connecting(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    done = bench("connecting.py", *("--ranks", 2), *("--rounds", 1), "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [row["what"] for row in rows][:3] == ["gloo, new_group", "new_group", "split"]
    assert all(row["connect_ms"] > 0 < row["close_ms"] for row in rows)


@pytest.mark.exhaustive
def test_agreed_measures_real_ranks(tmp_path: Path) -> None:
    out, backend = tmp_path / "rows.json", "gloo"
    done = bench("agreed.py", *("--ranks", 2), *("--backend", backend), *("--rounds", 1), "--json", out)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())
    assert (row["ranks"], row["backend"], row["tasks"]) == (2, backend, 50)
    assert row["times"] == pytest.approx(row["agreed_us"] / row["program_us"])
    assert row["scope_us"] > 0
    # one message there and one back for all tasks; more where they come apart
    assert 1.8 / 50 <= row["messages_per_op"] <= 2  # the receive for the next round may be posted after the count


def test_coalesce_has_a_row_per_list(tmp_path: Path) -> None:
    out, backend = tmp_path / "rows.json", "shm"
    lists = some([("64 x 64 B", 64 * 64), ("100 x 1 KiB", 100 << 10)], 1)
    names = ",".join(name for name, _ in lists)
    done = bench("coalesce.py", *("--backend", backend), *("--lists", names), *("--rounds", 1), "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [(row["tensors"], row["bytes"], row["ranks"], row["backend"]) for row in rows] == [
        (name, nbytes, 2, backend) for name, nbytes in lists
    ]
    for row in rows:
        assert row["over_gloo"] == pytest.approx(row["gloo_us"] / row["scope_us"])
        assert row["over_one_by_one"] == pytest.approx(row["one_by_one_us"] / row["scope_us"])


def test_models_are_of_the_size_that_is_known() -> None:
    done = bench("models.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ResNet-50: 161 parameters, 25,557,032 numbers\n"


@pytest.mark.exhaustive
def test_weights_has_a_row_per_contender(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = bench("weights.py", *("--servers", 1), *("--sizes", 100000), *("--rounds", 1), "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [row["contender"] for row in rows] == ["one broadcast", "one send each", "broadcast_state"]
    for row in rows:
        assert (row["servers"], row["rounds"]) == (1, 1)
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["push_ms"] / 1e6)
        assert row["idle_p99_ms"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("by_turns", [[], ["--by-turns"]], ids=["host by host", "by turns"])
def test_hosts_has_a_row_per_size(tmp_path: Path, by_turns: list[str]) -> None:
    out = tmp_path / "rows.json"
    done = bench("hosts.py", "--sizes", "8,4000000", *("--rounds", 1), *by_turns, "--json", out)
    if "no hosts can be made" in done.stderr:
        pytest.skip(done.stderr.splitlines()[-1])
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [(row["op"], row["bytes"], row["ranks"], row["hosts"]) for row in rows] == [
        ("all_reduce", 8, 4, 2),
        ("all_reduce", 4000000, 4, 2),
    ]
    large = rows[1]
    assert large["ratio"] == pytest.approx(large["gloo_us"] / large["hierarchical_us"])
    # a ring through all ranks crosses the cable twice with host after host, and four times with ranks in turns
    assert large["sent_ratio"] == pytest.approx(1 / 3 if by_turns else 2 / 3, rel=0.1)


BAD_ARGUMENTS = {
    "peers": (["collectives.py", "--peers", "gloo,carrier-pigeon"], "argument --peers: 'carrier-pigeon' is not one of"),
    "hint": (["hints.py", "--backend", "gloo", "--hint", "nonsense=1"], "argument --hint: gloo knows no 'nonsense'"),
    "only": (["forms.py", "--only", "telepathy"], "argument --only: no form contains 'telepathy'"),
    "rounds": (["completion.py", "--rounds", "0"], "arguments --delays, --rounds, --late: must be positive"),
    "ranks": (["agreed.py", "--simulate", "2,0"], "arguments --simulate, --ops, --rounds, --ranks: must be positive"),
    "scale": (["scale.py", "--ranks", "2"], "arguments --ranks, --per-host: at least 3 ranks, and 1 on a host"),
    "ranks of experts": (["experts.py", "--ranks", "3"], "argument --ranks: must divide the 8 experts, got 3"),
    "bucket-mb": (["gradients.py", "--bucket-mb", "0"], "argument --bucket-mb: must be positive, got 0"),
    "weights": (["weights.py", "--servers", "0"], "arguments --servers, --sizes, --rounds: must be positive"),
    "hosts": (["hosts.py", "--ops", "telepathy"], "argument --ops: 'telepathy' is not one of"),
    "per-host": (["hosts.py", "--per-host", "0"], "arguments --per-host, --rounds: must be positive"),
    "lists": (
        ["coalesce.py", "--lists", "64 x 64 B,a shopping list"],
        "argument --lists: there is no list 'a shopping list'",
    ),
}
ONE_AFTER_THE_OTHER = """
import contextlib, io, json, runpy, sys
ends = {}
for name, arguments in json.loads(sys.argv[1]).items():
    sys.argv[:] = arguments
    said, code = io.StringIO(), None
    with contextlib.redirect_stderr(said):
        try:
            runpy.run_path(arguments[0], run_name="__main__")
        except SystemExit as exc:
            code = exc.code
    ends[name] = code, said.getvalue()
print(json.dumps(ends))
"""


@pytest.fixture(scope="module")
def refusals() -> dict[str, tuple[int | None, str]]:
    """How the benches end that are given bad arguments, and what they say; in one process, which imports torch once."""
    done = bench("-c", ONE_AFTER_THE_OTHER, json.dumps({name: given for name, (given, _) in BAD_ARGUMENTS.items()}))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_arguments_are_named(refusals: dict[str, tuple[int | None, str]], name: str) -> None:
    code, said = refusals[name]
    assert code == 2, said
    assert BAD_ARGUMENTS[name][1] in said


@pytest.mark.exhaustive
def test_ddp_has_a_row_per_model(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = bench("ddp.py", *("--models", "convolutions"), *("--rounds", 1), "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [(row["model"], row["ranks"], row["bytes"] >> 20) for row in rows] == [("convolutions", 2, 8)]
    for row in rows:
        assert row["cost_ms"] == pytest.approx(row["asynccomm_ms"] - row["bare_ms"])
        assert row["ratio"] == pytest.approx(row["gloo_cost_ms"] / row["cost_ms"])


@pytest.mark.exhaustive
def test_experts_has_a_row_per_size(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = bench("experts.py", *("--sizes", "1024,4096"), *("--rounds", 1), "--json", out)
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [(row["bytes"], row["tokens"]) for row in rows] == [(1024, 1), (4096, 4)]
    assert all(row["ratio"] == pytest.approx(row["gloo_us"] / row["asynccomm_us"]) for row in rows)


def test_gradients_has_a_row_per_model(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = bench("gradients.py", *("--models", "convolutions"), *("--rounds", 1), *("--bucket-mb", 2), "--json", out)
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(out.read_text())
    assert (row["model"], row["ranks"], row["bytes"] >> 20, row["bucket_mb"]) == ("convolutions", 2, 8, 2.0)
    assert row["cost_ms"] == pytest.approx(row["reducer_ms"] - row["bare_ms"])
    for peer in ("asynccomm", "gloo"):
        assert row[f"over_{peer}"] == pytest.approx((row[f"{peer}_ms"] - row["bare_ms"]) / row["cost_ms"])
    assert row["thread_ms"] > 0


def test_queues_writes_a_row_per_contender(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    names = ["asynccomm", "multiprocessing", *(["pyzmq"] if find_spec("zmq") else []), "asyncio streams"]
    done = bench(
        *("queues.py", "--readers", 2, "--bytes", 1024, "--items", 100),
        *("--rounds", 1, "--contenders", ",".join(names), "--json", out),
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(out.read_text())
    assert [(row["contender"], row["readers"], row["bytes"]) for row in rows] == [(name, 2, 1024) for name in names]
    assert all(row["items_per_s"] > 0 and 0 < row["latency_us"] <= row["p99_us"] for row in rows)


@pytest.mark.parametrize("minutes", [0.03, pytest.param(10, marks=[pytest.mark.exhaustive, pytest.mark.timeout(900)])])
def test_every_acknowledged_item_of_a_queue_is_seen_once_and_in_order(minutes: float) -> None:
    command = [sys.executable, "queue_soak.py", "--minutes", str(minutes), "--visitors", "2"]
    limit = 120 + minutes * 60
    done = subprocess.run(command, cwd=ROOT / "bench", capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "items checked" in done.stdout


def test_blocking_has_a_row_for_a_twin_and_one_for_a_wait(tmp_path: Path) -> None:
    out = tmp_path / "rows.json"
    done = bench("blocking.py", "--rounds", 1, "--calls", 20, "--json", out)
    assert done.returncode == 0, done.stderr
    assert [(row["op"], row["peer"]) for row in json.loads(out.read_text())] == [
        ("twin", "hand-over"),
        ("wait", "await"),
    ]
