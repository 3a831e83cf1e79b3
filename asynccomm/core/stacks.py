"""The stacks of a process: its threads' frames, and for each task of a loop the chain of awaits down to the Work."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from types import FrameType
from typing import Any

from asynccomm.core.work import Work

DEPTH = 8  # frames shown of a thread; enough to lead back to the test from most libraries


def format_stacks(thread_id: int, loop: asyncio.AbstractEventLoop | None, caller: str = "") -> str:
    """The stacks of the main thread, of the thread ``thread_id`` if it is another one, and of the loop's tasks.

    From any thread.

    Args:
        thread_id: the thread of the loop; a blocking comm has a loop on a thread of its own.
        caller: a file, such as the test runner's; its frames are left out.
    """
    parts = []
    current = sys._current_frames()
    labels = {threading.main_thread().ident or 0: "main thread"}
    labels.setdefault(thread_id, "event loop's thread")
    for number, label in labels.items():
        frame = current.get(number)
        if frame is not None and not frame.f_code.co_filename.endswith("selectors.py"):  # an idle loop's selector
            parts.append(f"{label}:\n" + "".join(_tail(frame, caller)))
    for task in _tasks(loop):
        frames, work = _awaits(task.get_coro(), caller)
        if frames:
            waiting = f"waiting for {work!r}\n" if work is not None else ""
            lines = traceback.format_list([_summary(frame) for frame in frames])
            parts.append(f"task {task.get_name()!r}:\n" + "".join(lines) + waiting)
    return "\n".join(parts)


def _tail(frame: FrameType, caller: str) -> list[str]:
    """The innermost frames, without those up to the last frame of ``caller``."""
    summaries = traceback.extract_stack(frame)
    ours = [number for number, summary in enumerate(summaries) if summary.filename == caller]
    start = ours[-1] + 1 if ours else 0
    return traceback.format_list(summaries[start:][-DEPTH:] or summaries[-DEPTH:])


def _tasks(loop: asyncio.AbstractEventLoop | None) -> list[asyncio.Task[Any]]:
    if loop is None:
        return []
    for _ in range(3):
        try:
            tasks = [task for task in asyncio.all_tasks(loop) if not task.get_name().startswith("asynccomm ")]
            return sorted(tasks, key=lambda task: (len(task.get_name()), task.get_name()))  # Task-2 before Task-10
        except RuntimeError:  # the set changed while this thread iterated over it: retry
            continue
    return []


def _awaits(awaitable: Any, caller: str) -> tuple[list[FrameType], Work[Any] | None]:
    frames: list[FrameType] = []
    work: Work[Any] | None = None
    while awaitable is not None:
        frame = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        if frame is not None and frame.f_code.co_filename != caller:
            owner = frame.f_locals.get("self")
            if isinstance(owner, Work):
                work = owner
            else:
                frames.append(frame)
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
    return frames, work


def _summary(frame: FrameType) -> traceback.FrameSummary:
    return traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
