"""CUDA graphs with collectives in them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, final

import torch

from asynccomm.comm.methods.base import CommBase


@final
class GraphCapture(NamedTuple):
    """What :meth:`Comm.graph_capture` gives."""

    stream: torch.cuda.Stream  #: the current stream within: to be captured


class Graphs(CommBase):
    """Capturing."""

    @contextmanager
    def graph_capture(self, stream: torch.cuda.Stream | None = None) -> Iterator[GraphCapture]:
        """A stream to capture CUDA graphs on that contain collectives of this comm; it follows the current one.

        ::

            with comm.graph_capture() as capture, torch.cuda.graph(graph, stream=capture.stream):
                comm.all_reduce(tensor).wait()
            graph.replay()

        Within a capture, operations on tensors are queued on the stream that is captured, in the order of the calls,
        and run whenever the graph is replayed; all ranks must capture the same ones, and replay the graph as often.
        ``wait`` and ``wait_stream`` order streams as ever; awaiting such a Work raises ``RuntimeError``. What needs
        the host (objects, dicts, streams, barriers, uneven tensors of sizes unknown) raises ``RuntimeError`` at the
        call. The collectives must have been used before: NCCL cannot connect within a capture. Reset the graphs before
        the comm is closed, which NCCL otherwise waits for.

        Args:
            stream: to use, instead of a new one.

        Raises: RuntimeError on a CPU.
        """
        if self.device.type != "cuda":
            raise RuntimeError(f"graph_capture() needs a GPU, but comm {self.name!r} is on {self.device}")
        here = torch.cuda.current_stream(self.device)
        captured = torch.cuda.Stream(self.device) if stream is None else stream  # type: ignore[no-untyped-call]
        captured.wait_stream(here)
        with torch.cuda.stream(captured):
            yield GraphCapture(captured)
        here.wait_stream(captured)
