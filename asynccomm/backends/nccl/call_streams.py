"""The streams that operations come from: noted at their calls, and followed when they are submitted.

An operation that is held may be submitted while another stream is current, so the stream of its call is kept with it.
An event that is recorded there when it is submitted covers what was queued at the call, and maybe more.

A call within a capture into a graph belongs to that graph, and one outside of it to none: a stream cannot follow
another across that border, so an operation must be submitted on the side that it was called on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import final

from asynccomm.backends.base import Submission
from asynccomm.backends.nccl.device import Device, DeviceStream
from asynccomm.ops import Op


@final
@dataclass(frozen=True, slots=True)
class CallStream:
    """Of one call."""

    stream: DeviceStream
    capture: int  #: that the stream was part of; 0: none


def note(device: Device) -> CallStream:
    """That of a call at this moment, by this thread."""
    current = device.current_stream()
    return CallStream(current, device.capture_of(current))


def streams(device: Device, submissions: Iterable[Submission]) -> list[DeviceStream]:
    """What ``submissions`` are to follow, each once: their calls' streams, or the current one where none is noted.

    Raises: RuntimeError, naming the operation that was called on the other side of a capture.
    """
    current = device.current_stream()
    found: dict[int, DeviceStream] = {}
    capture: int | None = None  # looked up only if a call was noted: usually none is
    for submission in submissions:
        origin = submission.origin
        for one in origin if isinstance(origin, tuple) else (origin,):
            if one is None:
                found[current.handle] = current
                continue
            assert isinstance(one, CallStream)
            if capture is None:
                capture = device.capture_of(current)
            _check(submission.op, one.capture, capture)
            if one.stream.handle not in found:
                _check(submission.op, device.capture_of(one.stream), capture)
                found[one.stream.handle] = one.stream
    return list(found.values())


def stream(device: Device, submission: Submission) -> DeviceStream:
    """The same for one that was not merged, and so follows one stream."""
    (found,) = streams(device, (submission,))
    return found


def _check(op: Op, theirs: int, ours: int) -> None:
    if theirs == ours:
        return
    if theirs and ours:
        raise RuntimeError(f"{op} was called in the capture of another CUDA graph than the one it would become part of")
    if theirs:
        raise RuntimeError(f"{op} was called within the capture of a CUDA graph, and must be submitted there, too")
    raise RuntimeError(f"{op} was called outside of the capture of a CUDA graph, and must be submitted outside, too")
