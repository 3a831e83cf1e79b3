"""The receiving side of an operation with parcels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import final

from torch import Tensor

from asynccomm.backends.arithmetic import landing
from asynccomm.backends.base import Submission
from asynccomm.backends.hazards import apart, load
from asynccomm.errors import AsyncCommError, PayloadError, describe_exception


@final
class Delivery:
    """The parcels that one submission receives: allocates memory for their payloads and records the first error.

    A backend makes the delivery when the operation takes effect, before it reads ``submission.parcels``: parcels that
    share memory with the outputs are copied here.
    """

    def __init__(self, submission: Submission) -> None:
        self._submission = submission
        self._copies: list[Callable[[], object]] = []
        self._lands: Sequence[Callable[[], object]] = ()
        self.error: AsyncCommError | None = None  #: the reason why a payload was refused, if any
        self.places: list[Tensor] = []  #: the final memory of the payloads
        load(submission)
        outputs = submission.outputs
        if outputs:
            submission.parcels, outputs, self._lands = apart(submission.parcels, outputs)
        #: tensors allocated for the result when the operation took effect
        self.made: Sequence[Tensor] = ()
        if submission.begin is not None:
            self.made = submission.begin(submission.parcels, outputs)

    def accept(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor] | None:
        """Plain tensors for the payload, one after the other; None: the payload is refused and must be discarded.

        The backend calls this method once for each parcel, whatever its length.
        """
        place = self._submission.place
        assert place is not None
        try:
            tensors = [tensor.detach() for tensor in place(source, head, lengths)]
            room = sum([tensor.nbytes for tensor in tensors])
            if room != lengths[source]:
                raise PayloadError(f"rank {source} sent {lengths[source]} bytes where {room} fit")
        except Exception as exc:
            if not isinstance(exc, AsyncCommError):
                error: AsyncCommError = PayloadError(
                    f"what rank {source} sent cannot be taken: {describe_exception(exc)}"
                )
                error.__cause__ = exc
            else:
                error = exc
            self.error = self.error or error
            return None
        self.places += tensors
        landings = []
        for tensor in tensors:
            plain, copy = landing(tensor)
            landings.append(plain)
            if copy is not None:
                self._copies.append(copy)
        return landings

    def finish(self) -> None:
        """Copy the complete payloads, and this rank's own share, to their places.

        The backend then settles the Work with ``error``. The delivery keeps the memory that it copies from: on a device
        the copies are only queued by now.
        """
        if self.error is None:
            if self._submission.keep is not None:
                self._submission.keep()
            for copy in (*self._copies, *self._lands):
                copy()
