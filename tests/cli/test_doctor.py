"""The report of the doctor, of machines that are put together here, and of this one."""

from __future__ import annotations

import json
import warnings
from typing import Any

import pytest

from asynccomm.backends.names import backend_names
from asynccomm.cli import doctor
from asynccomm.cli.doctor import PROBES, Checkup, as_text, examine
from asynccomm.cli.main import main
from asynccomm.cli.probing import CheckWarning, Section, SystemInfo
from asynccomm.version import __version__
from tests.cli.pretended_machine import Words, a_torch, check, fail, machine, probe


@pytest.mark.parametrize(
    ("torch", "facts", "warned"),
    [
        (a_torch(), {"version": "2.15.0", "built_for": "CUDA 13.2", "gloo": True}, []),
        (a_torch(cuda=None, nccl=()), {"built_for": "CPU only"}, []),
        (a_torch(cuda=None, hip="7.1"), {"built_for": "ROCm 7.1"}, []),
        (a_torch(gloo=False), {"gloo": False}, [("has no gloo: on CPUs, ranks must be on one machine", False)]),
        (a_torch(distributed=False), {"gloo": False}, [("this torch has no torch.distributed, whose", True)]),
    ],
)
def test_torch(torch: Any, facts: dict[str, object], warned: list[Words]) -> None:
    check(probe("torch", machine(torch=torch)), facts, warned)


class Registry:
    """backends.registry, with these for "auto"; those whose name begins with ! cannot be loaded."""

    def __init__(self, **auto: str) -> None:
        self._auto = auto

    def candidates(self, name: str, device: str) -> list[str]:
        assert name == "auto"
        if device not in self._auto:
            raise ValueError(f"no choice for {device}")
        return self._auto[device].split()

    def load_backend(self, name: str, device: str) -> None:
        if name.startswith("!"):
            raise ImportError(f"{name} is broken")


@pytest.mark.parametrize(
    ("auto", "torch", "cpu", "cuda", "warned"),
    [
        ({"cpu": "shm gloo"}, a_torch(), "shm, then gloo; the first that suits", "none: no choice for cuda", []),
        ({"cpu": "shm", "cuda": "nccl"}, a_torch(gpus=1), "shm", "nccl", []),
        ({"cpu": "shm", "cuda": "nccl"}, a_torch(), "shm", "nccl; but there is no GPU here", []),
        ({"cpu": "!shm gloo"}, a_torch(), "not !shm: !shm is broken, then gloo", "none", []),
        ({"cpu": "!shm"}, a_torch(), "not !shm", "none", [("no backend can be used for CPU tensors", True)]),
    ],
)
def test_backends(auto: dict[str, str], torch: Any, cpu: str, cuda: str, warned: list[Words]) -> None:
    section = probe("backends", machine(torch=torch, asynccomm__backends__registry=Registry(**auto)))
    check(section, {"known": backend_names()}, warned)
    assert str(section.facts["auto_for_cpu"]).startswith(cpu)
    assert str(section.facts["auto_for_cuda"]).startswith(cuda)


def test_a_probe_that_fails_is_alone() -> None:
    report = examine(
        machine(), {"bad": lambda system: fail(ValueError("no such thing")), "good": lambda system: Section({"n": 1})}
    )
    assert report.sections["bad"] == Section({}, [], "ValueError: no such thing")
    assert report.sections["good"] == Section({"n": 1}, [])
    assert not report.ok
    assert "FAILED   ValueError: no such thing" in as_text(report)


def test_what_python_warns_of_while_probing_is_reported_once() -> None:
    def warn(system: SystemInfo) -> Section:
        for _ in range(2):
            warnings.warn("the driver is too old", stacklevel=1)
        return Section({}, [CheckWarning("a", serious=True)])

    section = examine(machine(), {"probe": warn}).sections["probe"]
    assert section.warned == [CheckWarning("a", serious=True), CheckWarning("the driver is too old")]


@pytest.mark.parametrize(
    ("section", "ok", "summary"),
    [
        (Section({}), True, "nothing seems wrong"),
        (Section({}, [CheckWarning("a")]), True, "1 warning, none serious"),
        (Section({}, [CheckWarning("a"), CheckWarning("b")]), True, "2 warnings, none serious"),
        (
            Section({}, [CheckWarning("a"), CheckWarning("b", serious=True)]),
            False,
            "something is seriously wrong; see above",
        ),
        (Section({}, error="x"), False, "something is seriously wrong; see above"),
    ],
)
def test_whether_all_is_well(section: Section, ok: bool, summary: str) -> None:
    report = Checkup({"some": section})
    assert report.ok is ok
    assert as_text(report).splitlines()[-1] == summary


def test_text() -> None:
    facts = {
        "memory_bytes": 3 << 30,
        "free_bytes": 1 << 19,
        "yes": True,
        "absent": None,
        "names": ["a", "b"],
        "empty": [],
        "device_0": {"name": "H200", "memory_bytes": 1 << 30, "reaches": [1]},
    }
    assert as_text(
        Checkup({"one_thing": Section(facts, [CheckWarning("a"), CheckWarning("b", serious=True)])})
    ) == "\n".join(
        [
            f"asynccomm {__version__}",
            "",
            "one thing",
            "  memory    3.0 GiB",
            "  free      0.5 MiB",
            "  yes       yes",
            "  absent    none",
            "  names     a b",
            "  empty     none",
            "  device 0  name H200, memory 1.0 GiB, reaches 1",
            "  warning  a",
            "  SERIOUS  b",
            "",
            "something is seriously wrong; see above",
        ]
    )


@pytest.mark.parametrize(("serious", "code"), [(False, 0), (True, 1)])
def test_exit_code_and_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], serious: bool, code: int
) -> None:
    section = Section({"n": 1, "list": [1]}, (CheckWarning("a", serious),))
    monkeypatch.setattr(doctor, "examine", lambda system, probes: Checkup({"some": section}))
    assert main(["doctor", "--json"]) == code
    assert json.loads(capsys.readouterr().out) == {
        "ok": not serious,
        "asynccomm": __version__,
        "sections": {
            "some": {"facts": {"n": 1, "list": [1]}, "warned": [{"text": "a", "serious": serious}], "error": None}
        },
    }
    assert main(["doctor"]) == code
    assert "some\n  n     1\n" in capsys.readouterr().out


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["doctor", "--help"])
    assert ended.value.code == 0
    assert "usage: asynccomm doctor [--json]" in capsys.readouterr().out


def test_on_this_machine(launcher) -> None:
    code, out, err = launcher.run("doctor", "--json")
    report = json.loads(out)
    assert (code, err) == (0 if report["ok"] else 1, "")
    assert list(report["sections"]) == list(PROBES)
    assert {name: section["error"] for name, section in report["sections"].items() if section["error"]} == {}
    assert "shm" in report["sections"]["backends"]["facts"]["auto_for_cpu"]


def test_for_people_on_this_machine(launcher) -> None:
    code, out, err = launcher.run("doctor", environment={"CUDA_VISIBLE_DEVICES": ""})
    assert err == ""
    assert out.startswith(f"asynccomm {__version__}\n\npython\n")
    assert all(f"\n{name.replace('_', ' ')}\n" in out for name in PROBES)
    assert (code == 1) == out.endswith("something is seriously wrong; see above\n")
