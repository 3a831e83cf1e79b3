"""The streams that operations follow: captured at the call, looked up at submission.

A deferred operation may be submitted while another stream is current, so the submission keeps the stream of its call.
An event recorded on that stream at submission covers the work queued at the call, and maybe later work.

A call within a stream capture belongs to the captured graph, and a call outside belongs to no graph: no stream can
follow another stream across that border, so an operation must be submitted on the same side as its call.
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
    """The stream, and its graph capture, that were current when an operation was called."""

    stream: DeviceStream
    capture: int  #: id of the capture that the stream was part of; 0: none


def note(device: Device) -> CallStream:
    """The call stream of an operation that the calling thread calls now."""
    current = device.current_stream()
    return CallStream(current, device.capture_of(current))


def streams(device: Device, submissions: Iterable[Submission]) -> list[DeviceStream]:
    """The distinct streams that ``submissions`` must follow: the streams of their calls, else the current stream.

    Raises: RuntimeError, naming an operation whose call was on the other side of a capture.
    """
    current = device.current_stream()
    found: dict[int, DeviceStream] = {}
    capture: int | None = None  # looked up only for a deferred operation: most are not deferred
    for submission in submissions:
        call_context = submission.call_context
        for one in call_context if isinstance(call_context, tuple) else (call_context,):
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
    """The stream that ``submission`` must follow; for an operation that was not merged, which has only one."""
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
