"""The binding: against the real library as far as that goes without a GPU, and against one that records its calls."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asynccomm.backends.nccl import api
from asynccomm.backends.nccl import bindings as module
from asynccomm.errors import BackendError

HERE = Path(__file__).parent
ROOT = HERE.parent.parent.parent

# -- what may be missing


class Bindings(SimpleNamespace):
    """nccl4py as far as ``load`` looks at it."""

    NCCLError = type("NCCLError", (Exception,), {})

    def __init__(self, version: int | Exception = 23007, without: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.version, self.without = version, without

    def get_version(self) -> int:
        if isinstance(self.version, Exception):
            raise self.version
        return self.version

    def _inspect_function_pointer(self, name: str) -> int:
        return 0 if name.removeprefix("__nccl") in self.without else 4096


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., api.Nccl]:
    def loading(bindings: Any = None, version: str = "0.6.0") -> api.Nccl:
        def find(name: str) -> Any:
            if isinstance(bindings, Exception):
                raise bindings
            return bindings

        monkeypatch.setattr(module, "import_module", find)
        monkeypatch.setattr(module, "version", lambda name: version)
        return module.load.__wrapped__()

    return loading


@pytest.mark.parametrize(
    ("cuda", "what"), [("13.2", "asynccomm\\[cu13\\]$"), ("12.8", "asynccomm\\[cu12\\]$"), (None, "a torch that is")]
)
def test_nccl4py_is_missing(load, monkeypatch: pytest.MonkeyPatch, cuda: str | None, what: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(BackendError, match=f"^backend 'nccl' needs the package nccl4py: install .*{what}"):
        load(ModuleNotFoundError("No module named 'nccl'", name="nccl"))


@pytest.mark.parametrize(
    "error",
    [ModuleNotFoundError("No module named 'numpy'", name="numpy"), ImportError("undefined symbol: x"), Bindings()],
)
def test_nccl4py_is_damaged(load, error: Any) -> None:
    if isinstance(error, Bindings):
        error = SimpleNamespace(get_version=error.get_version)  # without what tells which functions there are
    with pytest.raises(BackendError, match=r"^nccl4py cannot be imported \(.*\): install asynccomm\[.*again$"):
        load(error)


@pytest.mark.parametrize("version", ["0.5.9", "0.7.0", "1.0", "0+unknown", ""])
def test_an_nccl4py_that_was_not_tested(load, version: str) -> None:
    with pytest.raises(BackendError, match=r"^nccl4py .* not one .* tested with: install 'nccl4py>=0.6,<0.7'$"):
        load(Bindings(), version)


@pytest.mark.parametrize("version", ["0.6.0", "0.6.3.post1", "0.6"])
def test_an_nccl4py_that_was(load, version: str) -> None:
    assert load(Bindings(), version).version == 23007


def test_the_library_is_missing(load) -> None:
    with pytest.raises(
        BackendError, match=r"^libnccl.so.2 was not found \(no nccl\): torch brings it .* this is torch"
    ):
        load(Bindings(RuntimeError("no nccl\n  searched: here\n  and there")))


def test_the_library_is_too_old(load) -> None:
    with pytest.raises(BackendError, match=r"^NCCL 2.27.5 is too old: asynccomm needs 2.28.0 or newer"):
        load(Bindings(22705))


def test_functions_are_missing(load) -> None:
    with pytest.raises(BackendError, match=r"version 2.30.7, has no ncclCommSplit, ncclSend$"):
        load(Bindings(without=("Send", "CommSplit")))


def test_what_is_native_depends_on_the_library(load) -> None:
    calls = {"all_to_all", "gather", "scatter", "shrink", "estimate"}
    assert load(Bindings()).native == calls | {"windows", "register"}
    without = ("AlltoAll", "CommShrink", "GroupSimulateEnd")
    assert load(Bindings(without=without)).native == {"gather", "scatter", "windows", "register"}
    for missing in ("PutSignal", "WaitSignal", "MemAlloc", "CommWindowRegister"):  # NCCL 2.28 has windows alone
        assert load(Bindings(without=(missing,))).native == calls | {"register"}
    assert load(Bindings(without=("CommDeregister",))).native == calls | {"windows"}


def test_a_function_that_is_not_there(load) -> None:
    """The backend looks into ``native`` first; the bindings raise an error of their own, which is a RuntimeError."""
    bindings = Bindings(without=("Gather",))
    bindings.gather = lambda *args: (_ for _ in ()).throw(RuntimeError("function ncclGather is not found"))
    with pytest.raises(BackendError, match=r"^NCCL could not start gather: function ncclGather is not found$"):
        load(bindings).gather(1, 2, 3, 7, 0, 171, 9)


def test_without_nccl4py_only_loading_fails() -> None:
    source = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "nccl":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import asynccomm
from asynccomm.backends.nccl import bindings
assert "nccl" not in sys.modules
try:
    bindings.load()
except asynccomm.BackendError as exc:
    print(exc)
"""
    assert python(source).startswith("backend 'nccl' needs the package nccl4py: install asynccomm[cu1")


def python(source: str) -> str:
    command = [sys.executable, "-c", source]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stderr
    return done.stdout


def environment() -> dict[str, str]:
    path = os.environ.get("PYTHONPATH")
    return os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{path}" if path else str(ROOT)}


# -- the real library


@pytest.fixture
def nccl() -> api.Nccl:
    pytest.importorskip("nccl.bindings.nccl", reason="needs nccl4py")
    try:
        return module.load()
    except BackendError as exc:
        pytest.skip(f"needs a libnccl: {exc}")


def test_it_is_loaded_once(nccl: api.Nccl) -> None:
    assert nccl is module.load()
    assert nccl.version >= 22800
    assert nccl.dtypes == api.DTYPES
    assert nccl.reductions == api.REDUCTIONS
    assert {"all_to_all", "gather", "scatter", "shrink", "estimate", "register"} <= nccl.native
    assert ("windows" in nccl.native) is (nccl.version >= 22900)


def test_unique_ids(nccl: api.Nccl) -> None:
    one, other = nccl.unique_id(), nccl.unique_id()
    assert (len(one), len(other)) == (128, 128)
    assert one != other
    with pytest.raises(ValueError, match="128"):
        nccl.init(1, 0, one[:-1], api.Config())


def test_groups(nccl: api.Nccl) -> None:
    nccl.group_start()
    nccl.group_start()
    nccl.group_end()
    nccl.group_end()
    with pytest.raises(api.NcclError, match="could not start the operations of a group: invalid usage") as caught:
        nccl.group_end()
    assert caught.value.code == 5
    assert type(caught.value.__cause__).__name__ == "NCCLError"


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_there_is_no_communicator(nccl: api.Nccl) -> None:
    with pytest.raises(api.NcclError, match="could not make a communicator of 2 ranks: unhandled cuda error"):
        nccl.init(2, 0, nccl.unique_id(), api.Config())
    with pytest.raises(api.NcclError, match="group"):
        nccl.group_end()  # the group that NCCL 2.30 leaves open is gone


# -- a library that records


class Stub:
    """A process with the stub preloaded."""

    def __init__(self, library: Path, log: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "stub_process.py")],
            env=environment() | {"LD_PRELOAD": str(library), "NCCL_STUB_LOG": str(log)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, source: str, **settings: object) -> dict[str, Any]:
        """Evaluate ``source``, where ``nccl`` is the binding; ``settings`` are the stub's."""
        line = {"source": source, "settings": {name: str(value) for name, value in settings.items()}}
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(line), file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        assert answer, f"the process ended at {source}; its stderr is above"
        result: dict[str, Any] = json.loads(answer)
        result["calls"] = [call.strip() for call in result["calls"].splitlines()]
        return result

    def close(self) -> None:
        with self._process as process:
            assert process.stdin is not None
            process.stdin.close()
            process.wait(60)


@pytest.fixture(scope="module")
def stub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stub]:
    pytest.importorskip("nccl.bindings.nccl", reason="needs nccl4py")
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler, for a library that records its calls")
    directory = tmp_path_factory.mktemp("stub")
    library = directory / "stub_nccl.so"
    command = [compiler, "-shared", "-fPIC", "-o", library, HERE / "stub_nccl.c"]
    if torch.version.cuda is None:
        # nccl4py looks for a libnccl even if it finds each function elsewhere, so where torch brings none, this is it;
        # torch itself could not be linked to it
        command.append("-Wl,-soname,libnccl.so.2")
    subprocess.run(command, check=True, timeout=60)
    process = Stub(library, directory / "log")
    try:
        yield process
    finally:
        process.close()


COMM = "comm(0xab)"
HOT = {
    f"all_reduce(1, 2, 3, 7, 4, {COMM}, 9)": "ncclAllReduce 0x1 0x2 3 7 4 0xab 0x9",
    f"broadcast(1, 2, 3, 7, 5, {COMM}, 9)": "ncclBroadcast 0x1 0x2 3 7 5 0xab 0x9",
    f"reduce(1, 2, 3, 7, 4, 5, {COMM}, 9)": "ncclReduce 0x1 0x2 3 7 4 5 0xab 0x9",
    f"all_gather(1, 2, 3, 7, {COMM}, 9)": "ncclAllGather 0x1 0x2 3 7 0xab 0x9",
    f"reduce_scatter(1, 2, 3, 7, 4, {COMM}, 9)": "ncclReduceScatter 0x1 0x2 3 7 4 0xab 0x9",
    f"all_to_all(1, 2, 3, 7, {COMM}, 9)": "ncclAlltoAll 0x1 0x2 3 7 0xab 0x9",
    f"gather(1, 2, 3, 7, 5, {COMM}, 9)": "ncclGather 0x1 0x2 3 7 5 0xab 0x9",
    f"scatter(1, 2, 3, 7, 5, {COMM}, 9)": "ncclScatter 0x1 0x2 3 7 5 0xab 0x9",
    f"send(1, 3, 7, 5, {COMM}, 9)": "ncclSend 0x1 3 7 5 0xab 0x9",
    f"recv(1, 3, 7, 5, {COMM}, 9)": "ncclRecv 0x1 3 7 5 0xab 0x9",
    f"put_signal(1, 3, 5, window(0x30), 64, {COMM}, 9)": "ncclPutSignal 0x1 3 1 5 0x30 64 0 0 0 0xab 0x9",
    f"signal(5, {COMM}, 9)": "ncclSignal 5 0 0 0 0xab 0x9",
    f"wait_signal({{5: 3, 1: 2}}, {COMM}, 9)": "ncclWaitSignal 2 3*5/0/0,2*1/0/0, 0xab 0x9",
}
RARE = {
    "group_start()": "ncclGroupStart",
    "group_end()": "ncclGroupEnd",
    f"finalize({COMM})": "ncclCommFinalize 0xab",
    f"destroy({COMM})": "ncclCommDestroy 0xab",
    f"drop_reduction(17, {COMM})": "ncclRedOpDestroy 17 0xab",
    f"pre_mul_sum(1, 7, {COMM}, on_device=True)": "ncclRedOpCreatePreMulSum 0x1 7 0 0xab",
    f"pre_mul_sum(1, 7, {COMM}, on_device=False)": "ncclRedOpCreatePreMulSum 0x1 7 1 0xab",
    f"progress({COMM})": "ncclCommGetAsyncError 0xab",
    "mem_alloc(4096)": "ncclMemAlloc 4096",
    "mem_free(4096)": "ncclMemFree 0x1000",
    f"register({COMM}, 1, 64)": "ncclCommRegister 0xab 0x1 64",
    f"deregister({COMM}, 74)": "ncclCommDeregister 0xab 0x4a",
    f"window_register({COMM}, 4096, 64)": "ncclCommWindowRegister 0xab 0x1000 64 1",
    f"window_deregister({COMM}, window(0x30))": "ncclCommWindowDeregister 0xab 0x30",
}


def function(call: str) -> str:
    return call.split()[0]


@pytest.mark.parametrize(("source", "call"), (HOT | RARE).items(), ids=lambda text: text.split("(")[0].split()[0])
def test_each_call_arrives_as_it_was_made(stub: Stub, source: str, call: str) -> None:
    if source == "group_end()":
        stub.run("nccl.group_start()")
    done = stub.run(f"nccl.{source}")
    if source == "group_start()":
        stub.run("nccl.group_end()")
    assert (done["calls"], done["error"]) == ([call], None)


@pytest.mark.parametrize(("source", "call"), HOT.items(), ids=lambda text: text.split("(")[0].split()[0])
def test_being_in_progress_is_no_error(stub: Stub, source: str, call: str) -> None:
    assert stub.run(f"nccl.{source}", **{function(call): 7})["error"] is None


@pytest.mark.parametrize(("source", "call"), (HOT | RARE).items(), ids=lambda text: text.split("(")[0].split()[0])
def test_each_failure_is_one_of_ours(stub: Stub, source: str, call: str) -> None:
    if source == "group_end()":
        stub.run("nccl.group_start()")
    error = stub.run(f"nccl.{source}", **{function(call): 6, "LAST_ERROR": "the peer is gone"})["error"]
    if source == "group_start()":
        stub.run("nccl.group_end()")
    assert (error["code"], error["cause"]) == (6, "NCCLError")
    name = source.partition("(")[0]
    what = f"start {'put' if name == 'put_signal' else name}" if source in HOT else ".*"
    assert re.fullmatch(f"NCCL could not {what}: error 6 \\(the peer is gone\\)", error["text"])


def test_a_large_address_and_count(stub: Stub) -> None:
    done = stub.run(f"nccl.send(0x7fff00000000, 1 << 40, 1, 0, {COMM}, 0x7ffe00000000)")
    assert done["calls"] == ["ncclSend 0x7fff00000000 1099511627776 1 0 0xab 0x7ffe00000000"]


def test_version_and_unique_id(stub: Stub) -> None:
    assert stub.run("nccl.version")["value"] == 23203
    done = stub.run("len(nccl.unique_id()) == 128 and nccl.unique_id()[:4].decode()")
    assert (done["value"], done["calls"]) == ("uuuu", ["ncclGetUniqueId"] * 2)
    assert (
        stub.run("nccl.unique_id()", ncclGetUniqueId=2)["error"]["text"] == "NCCL could not make a unique id: error 2"
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("", "blocking=0,"),
        ("blocking=True", "blocking=1,"),
        ("name='main', net_name='Socket'", "blocking=0,net=Socket,name=main,"),
        ("min_ctas=1, max_ctas=8, cga_cluster_size=2, nvls_ctas=4", "blocking=0,cga=2,min=1,max=8,nvls=4,"),
        (
            "split_share=True, shrink_share=False, collnet_enable=True, cta_policy=1, traffic_class=3",
            "blocking=0,split_share=1,traffic_class=3,collnet=1,cta_policy=1,shrink_share=0,",
        ),
    ],
)
def test_init(stub: Stub, config: str, words: str) -> None:
    done = stub.run(f"int(nccl.init(4, 1, b'abc' + bytes(125), Config({config})))")
    assert (done["value"], done["calls"]) == (0xC1, [f"ncclCommInitRankConfig 4 abc 1 {words}"])


def test_a_communicator_takes_every_field_of_the_config(stub: Stub) -> None:
    fields = {"blocking", "name", "min_ctas", "max_ctas", "nvls_ctas", "cga_cluster_size", "cta_policy", "net_name"}
    fields |= {"traffic_class", "collnet_enable", "split_share", "shrink_share"}
    assert set(api.Config.__dataclass_fields__) == fields, "test_init has to try the new ones"


@pytest.mark.parametrize(
    ("source", "call"),
    [
        (f"split({COMM}, 3, 1, None)", "ncclCommSplit 0xab 3 1 -"),
        (f"split({COMM}, None, 0, None)", "ncclCommSplit 0xab -1 0 -"),
        (f"split({COMM}, 0, 2, Config(name='half'))", "ncclCommSplit 0xab 0 2 blocking=0,name=half,"),
        (f"shrink({COMM}, [3, 1], None, abort=False)", "ncclCommShrink 0xab 3,1, 2 - 0"),
        (f"shrink({COMM}, (2,), Config(), abort=True)", "ncclCommShrink 0xab 2, 1 blocking=0, 1"),
    ],
)
def test_children(stub: Stub, source: str, call: str) -> None:
    done = stub.run(f"int(nccl.{source})")
    assert (done["value"], done["calls"], done["error"]) == (0xC1, [call], None)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("init(2, 0, bytes(128), Config())", "ncclCommInitRankConfig"),
        (f"split({COMM}, 0, 0, None)", "ncclCommSplit"),
        (f"shrink({COMM}, [1], None, abort=True)", "ncclCommShrink"),
    ],
)
def test_a_communicator_that_fails_leaves_no_group_open(stub: Stub, source: str, name: str) -> None:
    """The stub leaves none, so the first end is refused; with the real library it takes one more."""
    done = stub.run(f"nccl.{source}", **{name: 3})
    assert done["error"]["code"] == 3
    assert [function(call) for call in done["calls"]] == [name, "ncclGroupEnd"]
    done = stub.run(f"[nccl.group_start(), nccl.group_start(), nccl.{source}]", **{name: 3})
    assert [function(call) for call in done["calls"]] == ["ncclGroupStart"] * 2 + [name] + ["ncclGroupEnd"] * 3


def test_progress(stub: Stub) -> None:
    assert stub.run(f"nccl.progress({COMM})")["value"] == 1
    assert stub.run(f"nccl.progress({COMM})", ASYNC=7)["value"] == 0
    error = stub.run(f"nccl.progress({COMM})", ASYNC=6, LAST_ERROR="no route")["error"]
    assert error["code"] == 6
    assert error["text"] == "NCCL could not finish the queued calls: error 6 (no route)"


@pytest.mark.parametrize("made", [f"split({COMM}, 0, 0, None)", f"shrink({COMM}, [1], None, abort=False)"])
def test_a_child_comes_when_its_parent_is_done(stub: Stub, made: str) -> None:
    done = stub.run(f"kept.update(child=nccl.{made}) or bool(kept['child'])", LATE=1, ASYNC=7)
    assert done["value"] == 0
    assert stub.run(f"nccl.progress({COMM}) or bool(kept['child'])", LATE=1, ASYNC=7)["value"] == 0
    assert stub.run(f"nccl.progress({COMM}) and int(kept['child'])", LATE=1)["value"] == 0xC1


@pytest.mark.parametrize(
    ("made", "address"), [(f"split({COMM}, 0, 0, None)", 0xAB), ("init(2, 0, bytes(128), Config())", 0xC1)]
)
@pytest.mark.parametrize("ending", ["progress", "destroy", "abort"])
def test_where_nccl_will_write_is_kept_until_it_has(stub: Stub, made: str, address: int, ending: str) -> None:
    awaited = "{hex(a): len(made) for a, made in nccl._awaited.items()}"
    stub.run("nccl._awaited.clear()")
    stub.run(f"[nccl.{made}, nccl.{made}, None][-1]", ASYNC=7)
    stub.run(f"nccl.progress(comm({address}))", ASYNC=7)
    assert stub.run(awaited)["value"] == f"{{'{address:#x}': 2}}"
    stub.run(f"nccl.progress(comm({address}))", ASYNC=6)
    assert stub.run(awaited)["value"] == f"{{'{address:#x}': 2}}"
    stub.run(f"nccl.{ending}(comm({address}))")
    assert stub.run(awaited)["value"] == "{}"


def test_all_are_aborted_in_one_group(stub: Stub) -> None:
    calls = ["ncclGroupStart", "ncclCommAbort 0xa", "ncclCommAbort 0xb", "ncclGroupEnd"]
    assert stub.run("nccl.abort(comm(0xa), comm(0xb))")["calls"] == calls


def test_what_cannot_be_aborted_does_not_keep_the_others(stub: Stub) -> None:
    done = stub.run("nccl.abort(comm(0xa), comm(0xb))", ncclCommAbort=2)
    assert done["calls"] == ["ncclGroupStart", "ncclCommAbort 0xa", "ncclCommAbort 0xb", "ncclGroupEnd"]
    assert done["error"]["text"] == "NCCL could not abort a communicator: error 2"
    assert stub.run("nccl.abort(comm(0xa))", ncclGroupEnd=1)["error"]["code"] == 1


def test_a_reduction_has_a_number(stub: Stub) -> None:
    assert stub.run(f"nccl.pre_mul_sum(1, 7, {COMM}, on_device=True)")["value"] == 17


def test_handles_are_those_of_nccl(stub: Stub) -> None:
    assert stub.run("nccl.mem_alloc(64)")["value"] == 0xA000
    assert stub.run(f"nccl.register({COMM}, 1, 64)")["value"] == 0x4A
    assert stub.run(f"int(nccl.window_register({COMM}, 1, 64))")["value"] == 0xC1


def test_a_window_comes_when_its_communicator_is_done(stub: Stub) -> None:
    done = stub.run(f"kept.update(window=nccl.window_register({COMM}, 1, 64)) or bool(kept['window'])", LATE=1, ASYNC=7)
    assert done["value"] == 0
    assert stub.run(f"nccl.progress({COMM}) and int(kept['window'])", LATE=1)["value"] == 0xC1


def test_an_estimate_is_in_seconds(stub: Stub) -> None:
    """nccl4py hands on NCCL's microseconds."""
    done = stub.run("str(round([nccl.group_start(), nccl.group_estimate()][1], 9))", MICROSECONDS=250)
    assert (done["value"], done["error"]) == ("0.00025", None)
    assert done["calls"] == ["ncclGroupStart", "ncclGroupSimulateEnd 74685283"]


def test_an_estimate_that_fails(stub: Stub) -> None:
    error = stub.run("[nccl.group_start(), nccl.group_estimate()]", ncclGroupSimulateEnd=3)["error"]
    assert error["text"] == "NCCL could not estimate the time of a group: error 3"
    assert error["code"] == 3


def test_what_was_estimated_is_dropped_by_a_group_that_fails(stub: Stub) -> None:
    done = stub.run(f"nccl.drop_queued({COMM}, 1, 9)")
    good, bad = (f"ncclBroadcast 0x1 0x1 1 1 {root} 0xab 0x9" for root in (0, -1))
    assert (done["calls"], done["error"]) == (["ncclGroupStart", good, bad, "ncclGroupEnd"], None)
    # it has ended the group, whatever of it was refused
    done = stub.run(f"nccl.drop_queued({COMM}, 1, 9)", ncclBroadcast=4)
    assert ([function(call) for call in done["calls"]][-1], done["error"]) == ("ncclGroupEnd", None)


def test_a_group_that_should_have_failed_is_told_of(stub: Stub) -> None:
    error = stub.run(f"nccl.drop_queued({COMM}, 1, 9)", TAKES_ANY_ROOT=1)["error"]
    assert error["text"] == "NCCL accepted an invalid root, and so may have run calls that were to be estimated"
