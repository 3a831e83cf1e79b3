"""``asynccomm doctor``: a report on this machine and its problems.

The probes are in ``host_probes`` and ``gpu_probes``; an exception in a probe becomes the error of its section.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib import import_module
from typing import Any, Final, final

from asynccomm.backends.names import backend_names
from asynccomm.cli.gpu_probes import cuda_section, devices_section, nccl_section
from asynccomm.cli.host_probes import (
    cpus_section,
    event_loop_section,
    executor_section,
    host_name_section,
    limits_section,
    python_section,
    shared_memory_section,
)
from asynccomm.cli.probing import CheckWarning, Section, SystemInfo, size_text
from asynccomm.cli.run import Commands
from asynccomm.version import __version__

_DESCRIPTION = """\
Look at what asynccomm needs here: Python, torch, CUDA, NCCL, devices, shared memory, limits, CPUs, the host's name, and
which backends "auto" takes; with --store, also the address and the interface that it takes between hosts. Prints a
report; the exit code is 1 if something is seriously wrong, else 0.
"""


def _torch(system: SystemInfo) -> Section:
    torch = system.module("torch")
    distributed = torch.distributed.is_available()
    gloo = distributed and torch.distributed.is_gloo_available()
    warned = []
    if not distributed:
        warned.append(CheckWarning("this torch has no torch.distributed, whose store the ranks meet on", serious=True))
    elif not gloo:
        warned.append(CheckWarning("this torch has no gloo: on CPUs, ranks must be on one machine"))
    kinds = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    built = next((f"{kind} {number}" for kind, number in kinds.items() if number), "CPU only")
    return Section({"version": str(torch.__version__), "built_for": built, "gloo": gloo}, warned)


def _backends(system: SystemInfo) -> Section:
    registry = system.module("asynccomm.backends.registry")
    torch = system.module("torch")
    chosen = partial(_chosen, registry, torch)
    (cpu, usable), (cuda, _) = chosen("cpu"), chosen("cuda")
    warned = [] if usable else [CheckWarning("no backend can be used for CPU tensors", serious=True)]
    return Section({"known": backend_names(), "auto_for_cpu": cpu, "auto_for_cuda": cuda}, warned)


def _chosen(registry: Any, torch: Any, kind: str) -> tuple[str, bool]:
    """A description of the backends that "auto" tries for a kind of device, and whether any of them can be loaded."""
    device = torch.device(kind)
    try:
        names = registry.candidates("auto", device)
    except ValueError as exc:
        return f"none: {exc}", False
    words, usable = [], False
    for name in names:
        try:
            registry.load_backend(name, device)
        except Exception as exc:
            words.append(f"not {name}: {exc}")
        else:
            words.append(name)
            usable = True
    text = ", then ".join(words)
    if len(words) > 1:
        text += "; the first that suits all ranks is taken, and the fastest is first"
    if kind == "cuda" and not torch.cuda.is_available():
        text += "; but there is no GPU here"
    return text, usable


def _way(host: str, port: int, system: SystemInfo) -> Section:
    facts, problem = system.module("asynccomm.cli.way").find_way(host, port, system.environ)
    return Section(facts, [CheckWarning(problem, serious=True)] if problem else [])


PROBES: Final[Mapping[str, Callable[[SystemInfo], Section]]] = {
    "python": python_section,
    "torch": _torch,
    "cuda": cuda_section,
    "devices": devices_section,
    "nccl": nccl_section,
    "shared_memory": shared_memory_section,
    "executor": executor_section,
    "limits": limits_section,
    "cpus": cpus_section,
    "event_loop": event_loop_section,
    "host_name": host_name_section,
    "backends": _backends,
}


@final
@dataclass(frozen=True, slots=True)
class Checkup:
    """All sections, by name."""

    sections: Mapping[str, Section]
    asynccomm: str = __version__

    @property
    def ok(self) -> bool:
        """Whether no problem is serious; a failed probe is serious."""
        sections = self.sections.values()
        return not any(section.error or any(found.serious for found in section.warned) for section in sections)


def examine(system: SystemInfo, probes: Mapping[str, Callable[[SystemInfo], Section]] = PROBES) -> Checkup:
    """Run all probes."""
    return Checkup({name: _isolated(probe, system) for name, probe in probes.items()})


def _isolated(probe: Callable[[SystemInfo], Section], system: SystemInfo) -> Section:
    with warnings.catch_warnings(record=True) as caught:  # torch's warnings explain a missing GPU
        warnings.simplefilter("always")
        try:
            section = probe(system)
        except Exception as exc:
            section = Section({}, error=f"{type(exc).__name__}: {exc}")
    texts = dict.fromkeys(str(warning.message) for warning in caught)
    return Section(section.facts, [*section.warned, *map(CheckWarning, texts)], section.error)


def as_text(report: Checkup) -> str:
    """The report as text."""
    lines = [f"asynccomm {report.asynccomm}"]
    for name, section in report.sections.items():
        lines += ["", name.replace("_", " ")]
        rows = [(_title(key), _text(key, value)) for key, value in section.facts.items()]
        width = max((len(title) for title, _ in rows), default=0)
        lines += [f"  {title:{width}}  {text}" for title, text in rows]
        if section.error:
            lines.append(f"  FAILED   {section.error}")
        lines += [f"  {'SERIOUS' if found.serious else 'warning'}  {found.text}" for found in section.warned]
    warned = sum(len(section.warned) for section in report.sections.values())
    summary = "nothing seems wrong" if not warned else f"{warned} warning{'s' if warned > 1 else ''}, none serious"
    lines += ["", summary if report.ok else "something is seriously wrong; see above"]
    return "\n".join(lines)


def _title(key: str) -> str:
    return key.removesuffix("_bytes").replace("_", " ")


def _text(key: str, value: object) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, dict):
        return ", ".join(f"{_title(inner)} {_text(inner, found)}" for inner, found in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "none"
    return size_text(value) if key.endswith("_bytes") and isinstance(value, int) else str(value)


def add_command(commands: Commands) -> None:
    """Register ``doctor`` with the command line."""
    parser = commands.add_parser(
        "doctor",
        help="look at what asynccomm needs here",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="asynccomm doctor [--json] [--store tcp://HOST:PORT]",
    )
    store = "the place where ranks of several hosts meet: says which address this host would use"
    parser.add_argument("--store", metavar="tcp://HOST:PORT", help=store)
    parser.add_argument("--json", action="store_true", help="print the report for machines")
    parser.set_defaults(command=_doctor, parser=parser)


def _doctor(arguments: argparse.Namespace) -> int:
    probes = dict(PROBES)
    if arguments.store is not None:
        try:
            host, port = import_module("asynccomm.cli.way").store_address(arguments.store)
        except ValueError as exc:
            arguments.parser.error(f"argument --store: {exc}")
        probes["way_to_the_store"] = partial(_way, host, port)
    report = examine(SystemInfo(), probes)
    print(json.dumps({"ok": report.ok, **asdict(report)}, indent=2) if arguments.json else as_text(report))
    return 0 if report.ok else 1
