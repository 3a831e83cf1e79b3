"""Which streams operations follow."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from asynccomm.backends.nccl import call_streams
from asynccomm.backends.nccl.call_streams import CallStream
from asynccomm.ops import Barrier

from .simulation import SimulatedDevice, SimulatedStream


@pytest.fixture
def device() -> Any:
    return SimulatedDevice()


def of(*noted: Any) -> Any:
    return [SimpleNamespace(op=Barrier(), call_context=call_context) for call_context in noted]


def test_a_call_is_noted_with_its_stream_and_capture(device: Any) -> None:
    assert call_streams.note(device) == CallStream(device.user, 0)
    device.capture = SimulatedStream()
    assert call_streams.note(device) == CallStream(device.capture, device.capture_of(device.capture))


def test_what_was_not_noted_follows_the_current_stream(device: Any) -> None:
    device.capture_of = lambda stream: pytest.fail("the usual case needs no driver")
    assert call_streams.streams(device, of(None, None)) == [device.user]
    assert call_streams.stream(device, of(None)[0]) is device.user


def test_each_stream_is_followed_once(device: Any) -> None:
    a, b, c = (CallStream(SimulatedStream(), 0) for _ in range(3))
    again = CallStream(a.stream, 0)
    assert call_streams.streams(device, of(a, (b, again), a, (c, b))) == [a.stream, b.stream, c.stream]
    assert call_streams.streams(device, of(a, None, (b, None))) == [a.stream, device.user, b.stream]
    assert call_streams.stream(device, of(b)[0]) is b.stream


def test_a_message_has_one(device: Any) -> None:
    a, b = (CallStream(SimulatedStream(), 0) for _ in range(2))
    with pytest.raises(ValueError, match="too many values"):
        call_streams.stream(device, of((a, b))[0])


def test_within_one_capture(device: Any) -> None:
    device.capture = SimulatedStream()
    joined = SimulatedStream()
    number = device.capture_of(device.capture)
    device.joined[joined.handle] = number
    found = call_streams.streams(device, of(call_streams.note(device), CallStream(joined, number)))
    assert found == [device.capture, joined]


def test_on_the_other_side_of_a_capture(device: Any) -> None:
    outside = call_streams.note(device)
    device.capture = SimulatedStream()
    inside = call_streams.note(device)
    with pytest.raises(
        RuntimeError, match=r"barrier\(\) was called outside of the capture of a CUDA graph, and must be"
    ):
        call_streams.streams(device, of(inside, (inside, outside)))
    device.capture = SimulatedStream()
    with pytest.raises(RuntimeError, match="called in the capture of another CUDA graph"):
        call_streams.streams(device, of(inside))
    device.capture = None
    with pytest.raises(RuntimeError, match=r"barrier\(\) was called within the capture of a CUDA graph, and must be"):
        call_streams.streams(device, of(outside, inside))


def test_a_stream_whose_capture_began_after_the_call(device: Any) -> None:
    """To follow it now would draw the comm's own stream into that graph."""
    stream = SimulatedStream()
    noted = CallStream(stream, 0)
    device.joined[stream.handle] = 5
    with pytest.raises(RuntimeError, match="was called within the capture"):
        call_streams.streams(device, of(noted))
