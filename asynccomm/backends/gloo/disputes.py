"""The exchange of descriptions after the ranks' frames have shown that they called different collectives.

Every rank detects the difference in the same frame, and sends all other ranks a description of its own call, on the
group of the frames. All ranks therefore raise the same error, with both descriptions as they would be printed on the
calling ranks.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, final

from asynccomm.backends.base import Submission
from asynccomm.backends.differences import Called, Issued, difference, issued, misfit
from asynccomm.backends.gloo.payloads import InboundParcel, OutboundParcel
from asynccomm.backends.gloo.torch_gloo import GlooGroup
from asynccomm.errors import BackendError, BrokenError, CollectiveMismatchError
from asynccomm.ops import AllToAll, MessageSpace, Parcel

MOST: Final = 1 << 24  # bytes of a rank's description
LISTED: Final = 1 << 14  # limit for the described operations of a batch, and for the texts of fused ones
_KEY: Final = MessageSpace.INTERNAL.key(0)


@final
class Dispute:
    """One difference; see the module.

    Args:
        gloo: the group of the frames, on which no other message uses the same tag.
        submission: this rank's collective at the place where ranks differ.
        sides: two ranks that differ; None: an uneven all_to_all, in which any two ranks may differ.
        end: called with the error, on a thread.
    """

    def __init__(
        self,
        gloo: GlooGroup,
        rank: int,
        size: int,
        submission: Submission,
        sides: tuple[int, int] | None,
        end: Callable[[Exception], object],
    ) -> None:
        self._gloo = gloo
        self._rank = rank
        self._size = size
        self._seq = submission.work.seq
        self._text = _said(submission)
        self._sides = sides
        self._end = end

    def begin(self, name: str) -> None:
        """Start a thread named ``name`` that runs the exchange."""
        threading.Thread(target=self._settle, name=name, daemon=True).start()

    def _settle(self) -> None:
        try:
            said = self._exchange()
            error: Exception = _error(self._seq, said, self._sides)
        except Exception as exc:
            error = exc
        self._end(error)

    def _exchange(self) -> list[_Said]:
        others = [rank for rank in range(self._size) if rank != self._rank]
        text = OutboundParcel(Parcel(self._text, ()))
        coming = [InboundParcel(self._gloo, rank, _KEY) for rank in others]
        sent = [step for rank in others for step in text.send(self._gloo, rank, _KEY)]
        texts = {self._rank: self._text}
        for rank, parcel in zip(others, coming, strict=True):
            parcel.read()
            texts[rank] = parcel.head
        for wait in sent:
            wait()
        return [_read(rank, texts[rank]) for rank in range(self._size)]


class _Said(NamedTuple):
    issued: Issued
    text: str  # the operation that differs
    sends: Sequence[int]  # of an uneven all_to_all
    receives: Sequence[int]


def _said(submission: Submission) -> bytes:
    op = submission.op
    mine = issued((submission,) if submission.batch is None else submission.batch[0])
    sizes = [op.sends, op.receives] if isinstance(op, AllToAll) else [(), ()]
    called, submitted = mine.called[:LISTED], mine.submitted[:LISTED]
    text = json.dumps([called, submitted, str(op), *sizes]).encode()
    return text if len(text) <= MOST else json.dumps([called[:1], submitted[:1], "", (), ()]).encode()


def _read(rank: int, text: bytes) -> _Said:
    try:
        called, submitted, own, sends, receives = json.loads(text)
        calls = [Called(int(number), str(said), (int(code), int(second))) for number, said, (code, second) in called]
        if not calls:
            raise ValueError("nothing is named")
        everything = Issued(calls, [str(said) for said in submitted])
        return _Said(everything, str(own), [int(n) for n in sends], [int(n) for n in receives])
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
