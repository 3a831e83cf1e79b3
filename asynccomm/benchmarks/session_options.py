"""The options of one run of ``asynccomm bench``, as the launcher gives them to its ranks. Without torch."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Self, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """The options, checked."""

    ops: list[str]  #: of ``rows.OPERATIONS``
    sizes: list[int]  #: bytes
    backend: str  #: a name, or "auto"
    peers: list[str]  #: "torch", which is gloo or NCCL, and "mpi"
    rounds: int
    out: str  #: the file for the measurements

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))
