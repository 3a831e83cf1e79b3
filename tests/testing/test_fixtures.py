"""Rank fixtures and arguments of tests, in one inner run; and the packing of values."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from asynccomm.testing import rank_fixture
from asynccomm.testing.fixtures import FunctionKey, RankOnly, SendingError, pack, registered, unpack

from .conftest import Project, Run
from .projects import HEAD

CONFTEST = """
    import os, pathlib, pytest
    from asynccomm.testing import rank_fixture

    @rank_fixture
    async def doubled(comm):
        return 2 * comm.size

    @rank_fixture(name="half")
    async def halves(comm, tmp_path, doubled):
        async with comm.split([comm.rank % 2, comm.rank % 2 + 2], "half") as half:
            yield half, doubled
            await half.barrier()
            (tmp_path / f"async {comm.rank}").touch()

    @rank_fixture
    def plain(tmp_path):
        rank = os.environ["RANK"]
        yield f"rank {rank}"
        assert (tmp_path / f"async {rank}").exists(), "torn down in the wrong order"
        (tmp_path / f"sync {rank}").touch()
        pathlib.Path(os.environ["DIRECTORY"], f"down {rank}").touch()

    @rank_fixture
    async def broken_start(tmp_path):
        return open(tmp_path / "absent")  # in conftest.py

    @rank_fixture(params=["one", "two"], ids=str.upper)
    def parameter(request):
        return request.param, request.fixturename, request.nodeid.rpartition("::")[2]

    @rank_fixture(autouse=True)
    def each_test(monkeypatch):
        monkeypatch.setattr(os, "EACH_TEST", "patched", raising=False)

    @pytest.fixture(autouse=True)
    def directory(monkeypatch):
        monkeypatch.setenv("DIRECTORY", str(pathlib.Path(__file__).parent))
"""

GOOD = """
    from asynccomm.testing import rank_fixture

    @pytest.mark.ranks(4)
    async def test_values(comm, plain, half, tmp_path):
        own, doubled = half
        assert own.size == 2 and doubled == 8 and plain == f"rank {comm.rank}"
        assert os.EACH_TEST == "patched"

    @pytest.mark.ranks(2)
    async def test_parameter(parameter):
        value, name, test = parameter
        assert name == "parameter" and test == f"test_parameter[{value.upper()}-2ranks]"

    def test_in_this_process():
        assert not hasattr(os, "EACH_TEST")

    @rank_fixture
    def shadow():
        return "module"

    @pytest.mark.ranks(1)
    class TestMethods:
        @rank_fixture
        def shadow(self, shadow):
            self.seen = shadow
            return "class"

        async def test_override(self, shadow):
            assert (self.seen, shadow) == ("module", "class")

    @pytest.mark.ranks(2)
    @pytest.mark.usefixtures("doubled")
    async def test_comm_of_a_fixture_only():
        pass

    def make(number):
        @rank_fixture
        def fixture():
            return number
        return fixture

    one, two = make(1), make(2)

    @pytest.fixture
    def cache():
        return "the project's own"

    @pytest.mark.ranks(1)
    async def test_name_of_pytest(cache):
        assert cache == "the project's own"

    @pytest.mark.ranks(2)
    async def test_factory(one, two):
        assert (one, two) == (1, 2)
"""

# the ranks import the second module only
FACTORY = {
    "factory.py": """
        from asynccomm.testing import rank_fixture

        def make(number):
            @rank_fixture
            def fixture():
                return number
            return fixture
    """,
    "test_factory_1.py": "from factory import make\n\nvalue = make(1)\n",
    "test_factory_2.py": """
        import pytest
        from factory import make

        value = make(2)

        @pytest.mark.ranks(1)
        async def test_shared_factory(value):
            assert value == 2
    """,
}

# fixtures of pytest, which work in one process only
ELSEWHERE = ["cache", "capsys", "record_testsuite_property", "request", "tmp_path_factory", "tmpdir_factory"]
if pytest.version_tuple >= (9,):
    ELSEWHERE.append("subtests")

BAD = """
    import contextlib, threading
    from asynccomm.testing import rank_fixture

    @pytest.fixture
    def model(comm):
        return comm.size

    @pytest.fixture
    def dynamic(request):
        return request.getfixturevalue("comm").size

    @pytest.fixture
    def of_rank(doubled):
        return doubled

    @pytest.fixture
    def lock():
        return threading.Lock()

    @rank_fixture
    def locked(lock):
        return lock

    class Unreadable:
        def __reduce__(self):
            return int, ("seven",)

    @pytest.fixture
    def unreadable():
        return Unreadable()

    @pytest.fixture
    def pending():
        async def soon(): pass
        return soon()

    @rank_fixture
    async def many():
        yield 1
        yield 2

    @rank_fixture
    def none():
        return
        yield

    @rank_fixture
    def broken_end(comm):
        yield
        raise LookupError("in the end")

    @rank_fixture
    async def waits_at_the_end(comm):
        yield
        await comm.barrier()

    def of(*names):
        @pytest.mark.ranks(2)
        @pytest.mark.usefixtures(*names)
        async def test(): pass
        return test

    test_model, test_dynamic, test_of_rank, test_locked = of("model"), of("dynamic"), of("of_rank"), of("locked")
    test_many, test_none, test_broken_end = of("many"), of("none"), of("broken_end")
    test_broken_start = of("broken_start")

    @pytest.mark.ranks(2, backend="absent")
    async def test_no_comm(comm): pass

    @pytest.mark.ranks(1)
    async def test_unreadable(unreadable): pass

    @pytest.mark.ranks(1)
    async def test_pending(pending): pass

    @pytest.mark.ranks(1)
    @pytest.mark.parametrize("value", [threading.Lock()], ids=["lock"])
    async def test_parametrized(value): pass

    @pytest.mark.ranks(2)
    async def test_cause(comm, waits_at_the_end, broken_end):
        if comm.rank == 1:
            raise KeyError("the cause")
        await comm.barrier()

    def test_ordinary(doubled): pass
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    files = {"conftest.py": CONFTEST, "test_good.py": HEAD + GOOD, "test_bad.py": HEAD + BAD, **FACTORY}
    tests = [f"@pytest.mark.ranks(1)\nasync def test_{name}({name}): pass\n" for name in ELSEWHERE]
    files["test_elsewhere.py"] = "import pytest\n\n" + "\n".join(tests)
    files["pytest.ini"] = "[pytest]\nasyncio_default_fixture_loop_scope = function\naddopts = -n 0 --cov-report=\n"
    return Project(tmp_path_factory.mktemp("fixtures"), files)


@pytest.fixture(scope="module")
def run(project: Project) -> Run:
    return project.run()


def test_values_and_ends(run: Run, project: Project) -> None:
    outcomes = {name: how for name, how in run.outcomes().items() if name.startswith("test_good")}
    assert list(outcomes) == [
        "test_good.py::test_values[4ranks]",
        "test_good.py::test_parameter[ONE-2ranks]",
        "test_good.py::test_parameter[TWO-2ranks]",
        "test_good.py::test_in_this_process",
        "test_good.py::TestMethods::test_override[1ranks]",
        "test_good.py::test_comm_of_a_fixture_only[2ranks]",
        "test_good.py::test_name_of_pytest[1ranks]",
        "test_good.py::test_factory[2ranks]",
    ]
    assert set(outcomes.values()) == {"passed"}, run.output
    assert {path.name for path in project.directory.glob("down *")} == {f"down {rank}" for rank in range(4)}


def test_a_factory_shared_by_modules(run: Run) -> None:
    assert run.only("test_shared_factory[1ranks]")["outcome"] == "passed", run.output


MAKE_IT = "decorate the fixture with asynccomm.testing.rank_fixture, and it runs in the ranks"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("test_model", "fixture 'model' runs in pytest's own process, but the value of fixture 'comm' exists in"),
        ("test_dynamic", "the value of fixture 'comm' exists in the ranks only, so 'size' cannot be read here"),
        ("test_of_rank", "fixture 'of_rank' runs in pytest's own process, but the value of fixture 'doubled' exists"),
        ("test_locked", "fixture 'lock' cannot be sent to the ranks: cannot pickle '_thread.lock' object; decor"),
        ("test_unreadable", "'unreadable' was sent to the ranks, but cannot be unpickled there: ValueError: invalid"),
        ("test_pending", "fixture 'pending' cannot be sent to the ranks: it is asynchronous, and no plugin of pytest"),
        *(
            (f"test_{name}", f"fixture {name!r} cannot be sent to the ranks: pytest's {name!r} works")
            for name in ELSEWHERE
        ),
        ("test_parametrized", "parameter 'value' cannot be sent to the ranks: cannot pickle '_thread.lock' object"),
        ("test_many", "ValueError: rank fixture 'many' yielded more than once"),
        ("test_none", "ValueError: rank fixture 'none' did not yield a value"),
        ("test_broken_end", "in the rest of rank fixture 'broken_end', after the test"),
        ("test_ordinary", "test_bad.py::test_ordinary uses the fixture `doubled` without @pytest.mark.ranks(size)"),
    ],
)
def test_misuse(run: Run, name: str, said: str) -> None:
    (entry,) = [one for one in run.reports if f"{name}[" in one["id"] + "[" and one["outcome"] == "failed"]
    assert said in entry["text"]
    if "fixture 'lock'" in said or "own process" in said:
        assert MAKE_IT in entry["text"]


@pytest.mark.parametrize(
    ("name", "frame"),
    [
        ("test_broken_start", 'async def broken_start(tmp_path):\n>       return open(tmp_path / "absent")  # in conf'),
        ("test_broken_end", "def broken_end(comm):\n        yield\n>       raise LookupError"),
        ("test_many", 'raise ValueError(f"rank fixture {name!r} yielded more than once")'),
        ("test_none", 'raise ValueError(f"rank fixture {argument.name!r} did not yield a value") from None'),
        ("test_no_comm", "in load_backend\n    raise ValueError("),
    ],
)
def test_tracebacks_begin_in_the_fixture(run: Run, name: str, frame: str) -> None:
    text = run.text(f"{name}[2ranks]")
    assert text.count(frame) == 2
    assert "asyncio" not in text, "the plugin's way to the fixture is of no interest"
    assert len(text.splitlines()) < 40


def test_the_cause_is_not_hidden_by_ends(run: Run) -> None:
    text = run.text("test_cause[2ranks]")
    assert text.startswith("rank 1 of 2 failed: KeyError: 'the cause'")
    assert "the rest of rank fixture 'broken_end' raised LookupError: in the end" in text
    assert "waits_at_the_end" not in text.partition("rank 0 of 2")[0].partition("KeyError")[0]


# -- in this process --------------------------------------------------------------------------------------------------


def test_only_functions() -> None:
    with pytest.raises(TypeError, match=r"rank_fixture decorates functions, got <class 'int'>"):
        rank_fixture(int)


def test_packing_keeps_names_and_shared_objects() -> None:
    shared: list[Any] = []
    values = unpack(pack({"a": shared, "b": (shared,), "c": RankOnly("c", is_method=False)}))
    assert values["b"][0] is values["a"]
    assert values["c"].name == "c"
    with pytest.raises(SendingError) as caught:
        pack({"a": 1, "b": threading.Lock()})
    assert (caught.value.name, caught.value.reason) == ("b", "cannot pickle '_thread.lock' object")


def test_functions_are_found_or_named() -> None:
    with pytest.raises(LookupError, match=r"have not imported rank fixture 'f' of /x.py; .*: No module named"):
        registered(FunctionKey("/x.py", 1, "f", "no_such_module_here", "/x.py", 1))
    with pytest.raises(LookupError, match=r"have not imported rank fixture 'f' of /x.py; define it in a conftest"):
        registered(FunctionKey("/x.py", 1, "f", "json", "/x.py", 1))
