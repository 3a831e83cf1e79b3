"""What the ranks tell each other once their frames have shown that they called different collectives.

Every rank sees that in the same frame, and each then sends all others what it has called: first how long the text is,
then the text. So all come to the same error, with both descriptions as they would be printed where they were called.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, final

import torch
from torch import Tensor

from asynccomm.backends.base import Submission
from asynccomm.backends.differences import Called, Issued, difference, issued, misfit
from asynccomm.backends.gloo.staging import room
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import AllToAll

__all__ = ["Dispute"]

MOST: Final = 1 << 24  # bytes of a rank's text
LISTED: Final = 1 << 14  # operations of a batch that are described, and texts of merged ones


@final
class Dispute:
    """One difference; see the module.

    Args:
        gather: an all_gather on a group whose operations are in the same order on all ranks, up to here; returns
            gloo's work.
        sides: two ranks that differ; None: an uneven all_to_all, of which any two may.
        end: takes the error, on a thread of gloo's.
    """

    def __init__(
        self,
        gather: Callable[[Tensor, Tensor], Any],
        submission: Submission,
        size: int,
        sides: tuple[int, int] | None,
        end: Callable[[Exception], object],
    ) -> None:
        self._gather = gather
        self._seq = submission.work.seq
        self._size = size
        self._sides = sides
        self._end = end
        self._text = torch.frombuffer(bytearray(_said(submission)), dtype=torch.uint8)
        self._lengths = room(8 * size)
        self._texts = room(0)

    def begin(self) -> None:
        """Start, on every rank at the same place in the order of ``gloo``."""
        mine = torch.tensor([len(self._text)], device="cpu").view(torch.uint8)
        self._then(self._gather(self._lengths, mine), self._exchange)

    def _exchange(self) -> None:
        longest = max(self._checked_lengths())
        mine = room(longest)
        mine[: len(self._text)] = self._text
        self._texts = room(self._size * longest)
        self._then(self._gather(self._texts, mine), partial(self._conclude, longest))

    def _checked_lengths(self) -> list[int]:
        lengths: list[int] = self._lengths.view(torch.int64).tolist()
        if not all(0 < length <= MOST for length in lengths):
            raise BackendError(f"the ranks announce descriptions of lengths that cannot be: {lengths}")
        return lengths

    def _conclude(self, longest: int) -> None:
        rows = self._texts.view(self._size, longest)
        lengths = self._checked_lengths()
        said = [_read(rank, rows[rank][: lengths[rank]]) for rank in range(self._size)]
        self._end(_error(self._seq, said, self._sides))

    def _then(self, work: Any, step: Callable[[], None]) -> None:
        def done(future: torch.futures.Future[object]) -> None:
            try:
                future.value()
                step()
            except Exception as exc:
                self._end(exc)

        work.get_future().add_done_callback(done)


class _Said(NamedTuple):
    issued: Issued
    text: str  # of the operation that differs
    sends: Sequence[int]  # of an uneven all_to_all
    receives: Sequence[int]


def _said(submission: Submission) -> bytes:
    op = submission.op
    mine = issued((submission,) if submission.batch is None else submission.batch[0])
    sizes = [op.sends, op.receives] if isinstance(op, AllToAll) else [(), ()]
    called, submitted = mine.called[:LISTED], mine.submitted[:LISTED]
    text = json.dumps([called, submitted, str(op), *sizes]).encode()
    return text if len(text) <= MOST else json.dumps([called[:1], submitted[:1], "", (), ()]).encode()


def _read(rank: int, data: Tensor) -> _Said:
    try:
        called, submitted, text, sends, receives = json.loads(bytes(data.tolist()))
        calls = [Called(int(number), str(said), (int(code), int(second))) for number, said, (code, second) in called]
        if not calls:
            raise ValueError("nothing is named")
        own = Issued(calls, [str(said) for said in submitted])
        return _Said(own, str(text), [int(n) for n in sends], [int(n) for n in receives])
    except (ValueError, TypeError, RecursionError) as exc:
        raise BackendError(f"rank {rank} differs from others, and its description is corrupt: {exc}") from exc


def _error(seq: int, said: Sequence[_Said], sides: tuple[int, int] | None) -> BrokenError:
    if sides is not None:
        one, other = sides
        return difference(one, said[one].issued, other, said[other].issued)
    if any(len(each.sends) != len(said) or len(each.receives) != len(said) for each in said):
        return BackendError("the sizes of an all_to_all do not fit each other, and not all ranks have named theirs")
    found = misfit([each.sends for each in said], [each.receives for each in said])
    if found is None:
        return BackendError("the sizes of an all_to_all fit each other, but the ranks have announced others")
    source, rank = found
    return CollectiveMismatchError(seq, source, said[source].text, rank, said[rank].text)
