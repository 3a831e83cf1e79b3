"""Python objects: collectives and point to point."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, SupportsIndex

from asynccomm.comm.methods.base import MAX_BYTES, CommBase, ObjectReceiver, ReceivePolicy
from asynccomm.core.work import Work
from asynccomm.errors import PayloadError
from asynccomm.ops import Call, Parcel, Parcels, RecvParcel, SendParcel
from asynccomm.ops.validation import check_rank, check_tag
from asynccomm.serialization.objects import PayloadKind, encode

_NOTHING = Parcel(b"", ())


class Objects(CommBase):
    """Python objects. Common to all of these methods:

    - An object is pickled by the call; what cannot be pickled is a TypeError there. Tensors in plain data are not: they
      travel beside it, and must not be changed before the Work is done. Those in other objects are pickled with them,
      as they are at the call. All arrive on the CPU.
    - ``weights_only``: with True, the default, what comes can only be plain data, tensors, and what
      ``torch.load(weights_only=True)`` takes (see ``torch.serialization.add_safe_globals``). False unpickles anything,
      which lets the sender run any code here.
    - ``max_bytes``: how much to take from one sender; more is thrown away before any memory is asked for.
    - An object is unpickled when the Work is first asked for it, so in the task that awaits. What cannot be taken is a
      PayloadError on that rank alone, and the comm goes on.
    - Plain data (None, bools, numbers, strings, bytes, lists, tuples, dicts, sets and dense tensors) is much faster
      than anything else. Two tensors that share memory arrive as two, unless they are the same object.
    - Cancelling the await is safe: the operation goes on.
    """

    def all_gather_object(
        self,
        obj: object,
        *,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[object]]:
        """Collect every rank's ``obj`` on all ranks.

        Returns: Work of a list in rank order; of its own object each rank gets a copy.
        """
        inbox = self._inbox("all_gather_object", PayloadKind.OBJECT, weights_only, max_bytes)
        parcel = encode(PayloadKind.OBJECT, obj)
        begin = partial(inbox.begin, parcel)
        call = Call(Parcels("all_gather_object"), (), (), None, inbox.all, (parcel,), inbox, begin=begin)
        return self._submit(call, timeout, hints, tag)

    def gather_object(
        self,
        obj: object,
        root: SupportsIndex,
        *,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[object] | None]:
        """Collect every rank's ``obj`` on rank ``root``.

        Returns: Work of a list in rank order on the root, with a copy of its own object; of None elsewhere.
        """
        taker = check_rank(self._group, "root", root)
        inbox = self._inbox("gather_object", PayloadKind.OBJECT, weights_only, max_bytes)
        parcel = encode(PayloadKind.OBJECT, obj)
        op = Parcels("gather_object", taker=taker)
        if taker != self.rank:
            return self._submit(Call(op, (), (), None, parcels=(parcel,)), timeout, hints, tag)
        call = Call(op, (), (), None, inbox.all, (parcel,), inbox, begin=partial(inbox.begin, parcel))
        return self._submit(call, timeout, hints, tag)

    def broadcast_object(
        self,
        obj: object,
        root: SupportsIndex,
        *,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[object]:
        """Give everybody the ``obj`` of rank ``root``; the others' are not looked at.

        Returns: Work of the object; on the root of ``obj`` itself.
        """
        giver = check_rank(self._group, "root", root)
        inbox = self._inbox("broadcast_object", PayloadKind.OBJECT, weights_only, max_bytes)
        op = Parcels("broadcast_object", giver=giver)
        if giver == self.rank:
            return self._submit(Call(op, (), (), obj, parcels=(encode(PayloadKind.OBJECT, obj),)), timeout, hints, tag)
        return self._submit(Call(op, (), (), None, inbox.only, place=inbox), timeout, hints, tag)

    def broadcast_object_list(
        self,
        object_list: list[Any],
        root: SupportsIndex,
        *,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[Any]]:
        """Replace the items of everybody's ``object_list`` by those of rank ``root``.

        Args:
            object_list: as long on all ranks; else PayloadError, and the list stays as it is. Filled when the Work is
                first asked for its result. The root's is not changed.

        Returns: Work of ``object_list``.
        """
        giver = check_rank(self._group, "root", root)
        inbox = self._inbox("broadcast_object_list", PayloadKind.OBJECT_LIST, weights_only, max_bytes)
        _check_list("object_list", object_list)
        op = Parcels("broadcast_object_list", giver=giver)
        if giver == self.rank:
            parcel = encode(PayloadKind.OBJECT_LIST, list(object_list), "object_list")
            return self._submit(Call(op, (), (), object_list, parcels=(parcel,)), timeout, hints, tag)
        return self._submit(Call(op, (), (), object_list, _filling(inbox), place=inbox), timeout, hints, tag)

    def scatter_object_list(
        self,
        input_list: Sequence[object] | None,
        root: SupportsIndex,
        *,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[object]:
        """Give each rank r the root's ``input_list[r]``.

        Args:
            input_list: on the root one object for each rank; elsewhere None or empty.

        Returns: Work of the object; on the root of a copy.
        """
        giver = check_rank(self._group, "root", root)
        inbox = self._inbox("scatter_object_list", PayloadKind.OBJECT, weights_only, max_bytes)
        op = Parcels("scatter_object_list", shared=False, giver=giver)
        if giver != self.rank:
            if input_list is not None and (not _is_sequence(input_list) or len(input_list)):
                raise ValueError(
                    f"input_list must be None or empty except on the root (rank {giver}), got {input_list!r}"
                )
            return self._submit(Call(op, (), (), None, inbox.only, place=inbox), timeout, hints, tag)
        if input_list is None:
            raise ValueError(f"input_list must be given on the root (rank {giver}), got None")
        if not _is_sequence(input_list):
            raise TypeError(f"input_list must be a list or tuple of objects, got {type(input_list).__name__}")
        if len(input_list) != self.size:
            raise ValueError(
                f"input_list must have one object for each of the {self.size} ranks, got {len(input_list)}"
            )
        parcels = [encode(PayloadKind.OBJECT, obj, f"input_list[{r}]") for r, obj in enumerate(input_list)]
        kept, parcels[giver] = parcels[giver], _NOTHING  # it is read when the operation takes effect, and not sent
        begin = partial(inbox.begin, kept)
        call = Call(op, kept.tensors, (), None, inbox.only, tuple(parcels), inbox, begin=begin)
        return self._submit(call, timeout, hints, tag)

    def send_object(
        self,
        obj: object,
        dst: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[None]:
        """Send ``obj`` to rank ``dst``, which takes it by :meth:`recv_object` under the same ``tag``.

        Objects are ordered per pair and tag, and never meet tensors sent under the same tag. Sending to oneself works.
        """
        op = SendParcel("send_object", check_rank(self._group, "dst", dst), check_tag(tag))
        return self._submit(Call(op, (), (), None, parcels=(encode(PayloadKind.OBJECT, obj),)), timeout, hints)

    def recv_object(
        self,
        src: SupportsIndex | None = None,
        tag: SupportsIndex = 0,
        *,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[object]:
        """Receive what rank ``src`` sends by :meth:`send_object` under ``tag``.

        Args:
            src: None: the object under ``tag`` that comes first, from any rank; not every backend can, and one that
                cannot raises ``ValueError``. ``Work.source`` says whose it was.

        Returns: Work of the object.
        """
        op = self._receive_op("recv_object", src, tag)
        inbox = self._inbox("recv_object", PayloadKind.OBJECT, weights_only, max_bytes, op.tag)
        return self._submit(Call(op, (), (), None, inbox.only, place=inbox), timeout, hints)

    def send_object_list(
        self,
        object_list: Sequence[object],
        dst: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[None]:
        """Send several objects to rank ``dst``, which takes them by :meth:`recv_object_list` under the same ``tag``."""
        op = SendParcel("send_object_list", check_rank(self._group, "dst", dst), check_tag(tag))
        if not _is_sequence(object_list):
            raise TypeError(f"object_list must be a list or tuple of objects, got {type(object_list).__name__}")
        parcel = encode(PayloadKind.OBJECT_LIST, list(object_list), "object_list")
        return self._submit(Call(op, (), (), None, parcels=(parcel,)), timeout, hints)

    def recv_object_list(
        self,
        object_list: list[Any],
        src: SupportsIndex | None = None,
        tag: SupportsIndex = 0,
        *,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[list[Any]]:
        """Replace the items of ``object_list`` by what rank ``src`` sends by :meth:`send_object_list` under ``tag``.

        Args:
            object_list: as long as the sender's; else PayloadError, and the list stays as it is. Filled when the Work
                is first asked for its result.
            src: None: from any rank, as with :meth:`recv_object`.

        Returns: Work of ``object_list``.
        """
        op = self._receive_op("recv_object_list", src, tag)
        _check_list("object_list", object_list)
        inbox = self._inbox("recv_object_list", PayloadKind.OBJECT_LIST, weights_only, max_bytes, op.tag)
        return self._submit(Call(op, (), (), object_list, _filling(inbox), place=inbox), timeout, hints)

    def _receive_op(self, method: str, src: SupportsIndex | None, tag: SupportsIndex) -> RecvParcel:
        return RecvParcel(method, None if src is None else check_rank(self._group, "src", src), check_tag(tag))

    def _inbox(
        self, method: str, kind: PayloadKind, weights_only: object, max_bytes: int, tag: int | None = None
    ) -> ObjectReceiver:
        """With a ``tag``, of a receive: what it misses may be a dict of tensors, which counts for those after it."""
        terms = ReceivePolicy.of(weights_only, max_bytes)
        missed = None if tag is None else lambda source, head: self._received_schemas.missed((source, tag), head)
        return ObjectReceiver(method, self.rank, kind, terms, missed)


def _filling(inbox: ObjectReceiver) -> Callable[[list[object]], list[object]]:
    """What fills a list once its new items have come."""

    def fill(object_list: list[object]) -> list[object]:
        items = inbox.only()
        (source,) = inbox.incoming
        if type(items) is not list:
            raise PayloadError(f"rank {source} sent {type(items).__name__} where a list was to come")
        if len(items) != len(object_list):
            raise PayloadError(f"rank {source} sent {len(items)} objects, but object_list has {len(object_list)}")
        object_list[:] = items
        return object_list

    return fill


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def _check_list(name: str, value: object) -> None:
    if not isinstance(value, list):
        raise TypeError(f"{name} must be a list, got {value!r} ({type(value).__name__})")
