"""Collectives and point-to-point operations on Python objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, SupportsIndex, TypeVar, Unpack, overload

from asynccomm.comm.methods.base import (
    MAX_BYTES,
    CollectiveArguments,
    CommBase,
    ObjectReceiver,
    ReceiveArguments,
    ReceivePolicy,
    check_type,
)
from asynccomm.core.work import Work
from asynccomm.errors import PayloadError
from asynccomm.ops import Call, Parcel, Parcels, SendParcel
from asynccomm.ops.validation import check_rank, check_tag
from asynccomm.options import check_bool
from asynccomm.serialization.objects import PayloadKind, encode

_NOTHING = Parcel(b"", ())
T = TypeVar("T")


class Objects(CommBase):
    """Python objects. Common to all of these methods:

    - The call pickles the object; an object that cannot be pickled raises TypeError there. Tensors and numpy arrays in
      values that need no ``weights_only=False`` are not pickled: they travel beside the data, and must not be changed
      before the Work is done. Tensors in other objects are pickled with them, as they are at the call. All tensors
      arrive on the CPU.
    - ``weights_only``: True, the default, carries plain data and tensors; dates, times, time zones, paths, Decimal,
      Fraction, UUID and OrderedDict; numpy arrays and scalars without Python objects; enums, dataclasses and
      NamedTuples that were registered by ``asynccomm.register_safe``; and classes that
      ``torch.load(weights_only=True)`` accepts (see ``torch.serialization.add_safe_globals``). Other objects raise
      TypeError at the sender's call, and PayloadError at a receiver. False on the sender and on the receivers pickles
      anything, which lets the sender run any code here.
    - ``expect``: a class; a received object that is no instance of it raises PayloadTypeError, which is a PayloadError
      and a TypeError. An object that this rank sends to receivers with the same ``expect`` is checked at the call.
    - ``max_bytes``: the limit for the bytes from one sender; a larger object is discarded before memory is allocated
      for it.
    - An object is unpickled when the result of the Work is first read, so in the awaiting task. An object that is not
      accepted raises PayloadError on that rank alone, and the comm goes on.
    - Plain data (None, bools, numbers, strings, bytes, lists, tuples, dicts, sets and dense tensors) is faster than
      all else. Two tensors that share memory arrive as two tensors, unless they are the same object.
    - Cancelling the await is safe: the operation goes on.
    """

    @overload
    def all_gather_object(
        self, obj: object, *, expect: None = None, **arguments: Unpack[CollectiveArguments]
    ) -> Work[list[object]]: ...

    @overload
    def all_gather_object(
        self, obj: object, *, expect: type[T], **arguments: Unpack[CollectiveArguments]
    ) -> Work[list[T]]: ...

    def all_gather_object(
        self,
        obj: object,
        *,
        expect: type[Any] | None = None,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[Any]]:
        """Collect every rank's ``obj`` on all ranks.

        Returns: Work of a list in rank order; each rank gets a copy of its own object.
        """
        receiver = self._receiver("all_gather_object", PayloadKind.OBJECT, weights_only, max_bytes, expect)
        receiver.policy.check_own("obj", obj)
        parcel = encode(PayloadKind.OBJECT, obj, weights_only=weights_only)
        begin = partial(receiver.begin, parcel)
        call = Call(Parcels("all_gather_object"), (), (), None, receiver.all, (parcel,), receiver, begin=begin)
        return self._submit(call, timeout, hints, tag)

    @overload
    def gather_object(
        self, obj: object, root: SupportsIndex, *, expect: None = None, **arguments: Unpack[CollectiveArguments]
    ) -> Work[list[object] | None]: ...

    @overload
    def gather_object(
        self, obj: object, root: SupportsIndex, *, expect: type[T], **arguments: Unpack[CollectiveArguments]
    ) -> Work[list[T] | None]: ...

    def gather_object(
        self,
        obj: object,
        root: SupportsIndex,
        *,
        expect: type[Any] | None = None,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[list[Any] | None]:
        """Collect every rank's ``obj`` on rank ``root``.

        Returns: Work of a list in rank order on the root, with a copy of its own object; of None elsewhere.
        """
        taker = check_rank(self._group, "root", root)
        receiver = self._receiver("gather_object", PayloadKind.OBJECT, weights_only, max_bytes, expect)
        receiver.policy.check_own("obj", obj)
        parcel = encode(PayloadKind.OBJECT, obj, weights_only=weights_only)
        op = Parcels("gather_object", taker=taker)
        if taker != self.rank:
            return self._submit(Call(op, (), (), None, parcels=(parcel,)), timeout, hints, tag)
        call = Call(op, (), (), None, receiver.all, (parcel,), receiver, begin=partial(receiver.begin, parcel))
        return self._submit(call, timeout, hints, tag)

    @overload
    def broadcast_object(
        self, obj: object, root: SupportsIndex, *, expect: None = None, **arguments: Unpack[CollectiveArguments]
    ) -> Work[object]: ...

    @overload
    def broadcast_object(
        self, obj: object, root: SupportsIndex, *, expect: type[T], **arguments: Unpack[CollectiveArguments]
    ) -> Work[T]: ...

    def broadcast_object(
        self,
        obj: object,
        root: SupportsIndex,
        *,
        expect: type[Any] | None = None,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Any]:
        """Give all ranks the ``obj`` of rank ``root``; the ``obj`` of other ranks is ignored.

        Returns: Work of the object; on the root of ``obj`` itself.
        """
        giver = check_rank(self._group, "root", root)
        receiver = self._receiver("broadcast_object", PayloadKind.OBJECT, weights_only, max_bytes, expect)
        op = Parcels("broadcast_object", giver=giver)
        if giver == self.rank:
            receiver.policy.check_own("obj", obj)
            parcel = encode(PayloadKind.OBJECT, obj, weights_only=weights_only)
            return self._submit(Call(op, (), (), obj, parcels=(parcel,)), timeout, hints, tag)
        return self._submit(Call(op, (), (), None, receiver.only, place=receiver), timeout, hints, tag)

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
        """Replace the items of ``object_list`` on all ranks by the items of rank ``root``.

        Args:
            object_list: a list of the same length on all ranks; another length raises PayloadError, and the list is not
                changed. It is filled when the result of the Work is first read. The root's list is not changed.

        Returns: Work of ``object_list``.
        """
        giver = check_rank(self._group, "root", root)
        receiver = self._receiver("broadcast_object_list", PayloadKind.OBJECT_LIST, weights_only, max_bytes)
        check_type("object_list", object_list, list, "a list")
        op = Parcels("broadcast_object_list", giver=giver)
        if giver == self.rank:
            parcel = encode(PayloadKind.OBJECT_LIST, list(object_list), "object_list", weights_only=weights_only)
            return self._submit(Call(op, (), (), object_list, parcels=(parcel,)), timeout, hints, tag)
        return self._submit(Call(op, (), (), object_list, _filling(receiver), place=receiver), timeout, hints, tag)

    @overload
    def scatter_object_list(
        self,
        input_list: Sequence[object] | None,
        root: SupportsIndex,
        *,
        expect: None = None,
        **arguments: Unpack[CollectiveArguments],
    ) -> Work[object]: ...

    @overload
    def scatter_object_list(
        self,
        input_list: Sequence[object] | None,
        root: SupportsIndex,
        *,
        expect: type[T],
        **arguments: Unpack[CollectiveArguments],
    ) -> Work[T]: ...

    def scatter_object_list(
        self,
        input_list: Sequence[object] | None,
        root: SupportsIndex,
        *,
        expect: type[Any] | None = None,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[Any]:
        """Give each rank r the root's ``input_list[r]``.

        Args:
            input_list: on the root one object for each rank; elsewhere None or empty.

        Returns: Work of the object; on the root of a copy.
        """
        giver = check_rank(self._group, "root", root)
        receiver = self._receiver("scatter_object_list", PayloadKind.OBJECT, weights_only, max_bytes, expect)
        op = Parcels("scatter_object_list", shared=False, giver=giver)
        if giver != self.rank:
            if input_list is not None and (not _is_sequence(input_list) or len(input_list)):
                raise ValueError(
                    f"input_list must be None or empty except on the root (rank {giver}), got {input_list!r}"
                )
            return self._submit(Call(op, (), (), None, receiver.only, place=receiver), timeout, hints, tag)
        if input_list is None:
            raise ValueError(f"input_list must be given on the root (rank {giver}), got None")
        if not _is_sequence(input_list):
            raise TypeError(f"input_list must be a list or tuple of objects, got {type(input_list).__name__}")
        if len(input_list) != self.size:
            raise ValueError(
                f"input_list must have one object for each of the {self.size} ranks, got {len(input_list)}"
            )
        parcels = []
        for rank, obj in enumerate(input_list):
            receiver.policy.check_own(f"input_list[{rank}]", obj)
            parcels.append(encode(PayloadKind.OBJECT, obj, f"input_list[{rank}]", weights_only=weights_only))
        kept, parcels[giver] = parcels[giver], _NOTHING  # read when the operation takes effect, and not sent
        begin = partial(receiver.begin, kept)
        call = Call(op, kept.tensors, (), None, receiver.only, tuple(parcels), receiver, begin=begin)
        return self._submit(call, timeout, hints, tag)

    def send_object(
        self,
        obj: object,
        dst: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        weights_only: bool = True,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[None]:
        """Send ``obj`` to rank ``dst``, which receives it by :meth:`recv_object` under the same ``tag``.

        Objects are ordered per pair of ranks and tag, and are never matched with tensors sent under the same tag. A
        rank may send to itself.
        """
        op = SendParcel("send_object", check_rank(self._group, "dst", dst), check_tag(tag))
        check_bool("weights_only", weights_only)
        parcel = encode(PayloadKind.OBJECT, obj, weights_only=weights_only)
        return self._submit(Call(op, (), (), None, parcels=(parcel,)), timeout, hints)

    @overload
    def recv_object(
        self,
        src: SupportsIndex | None = None,
        tag: SupportsIndex = 0,
        *,
        expect: None = None,
        **arguments: Unpack[ReceiveArguments],
    ) -> Work[object]: ...

    @overload
    def recv_object(
        self,
        src: SupportsIndex | None = None,
        tag: SupportsIndex = 0,
        *,
        expect: type[T],
        **arguments: Unpack[ReceiveArguments],
    ) -> Work[T]: ...

    def recv_object(
        self,
        src: SupportsIndex | None = None,
        tag: SupportsIndex = 0,
        *,
        expect: type[Any] | None = None,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[Any]:
        """Receive an object that rank ``src`` sends by :meth:`send_object` under ``tag``.

        Args:
            src: None: the first object under ``tag`` from any rank; a backend that does not support this raises
                ``ValueError``. ``Work.source`` gives the rank that sent it.

        Returns: Work of the object.
        """
        op = self._receive_op("recv_object", src, tag)
        receiver = self._receiver("recv_object", PayloadKind.OBJECT, weights_only, max_bytes, expect, op.tag)
        return self._submit(Call(op, (), (), None, receiver.only, place=receiver), timeout, hints)

    def send_object_list(
        self,
        object_list: Sequence[object],
        dst: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        weights_only: bool = True,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[None]:
        """Send several objects to rank ``dst``; it receives them by :meth:`recv_object_list` under the same ``tag``."""
        op = SendParcel("send_object_list", check_rank(self._group, "dst", dst), check_tag(tag))
        if not _is_sequence(object_list):
            raise TypeError(f"object_list must be a list or tuple of objects, got {type(object_list).__name__}")
        check_bool("weights_only", weights_only)
        parcel = encode(PayloadKind.OBJECT_LIST, list(object_list), "object_list", weights_only=weights_only)
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
        """Replace the items of ``object_list`` by objects that rank ``src`` sends by :meth:`send_object_list`.

        Args:
            object_list: a list as long as the sender's; another length raises PayloadError, and the list is not
                changed. It is filled when the result of the Work is first read.
            src: None: any rank, as with :meth:`recv_object`.
            tag: the tag of the send.

        Returns: Work of ``object_list``.
        """
        op = self._receive_op("recv_object_list", src, tag)
        check_type("object_list", object_list, list, "a list")
        receiver = self._receiver("recv_object_list", PayloadKind.OBJECT_LIST, weights_only, max_bytes, tag=op.tag)
        return self._submit(Call(op, (), (), object_list, _filling(receiver), place=receiver), timeout, hints)

    def _receiver(
        self,
        method: str,
        kind: PayloadKind,
        weights_only: object,
        max_bytes: int,
        expect: type | None = None,
        tag: int | None = None,
    ) -> ObjectReceiver:
        """The receiver of ``method``'s objects.

        A point-to-point receive gives its ``tag``: a dict of tensors that it refuses may carry a schema that the next
        dicts under that tag rely on, so the schema is stored.
        """
        policy = ReceivePolicy.of(weights_only, max_bytes, expect)
        missed = None if tag is None else lambda source, head: self._received_schemas.missed((source, tag), head)
        return ObjectReceiver(method, self.rank, [kind], policy, missed)


def _filling(receiver: ObjectReceiver) -> Callable[[list[object]], list[object]]:
    """A function that fills a list with the received items."""

    def fill(object_list: list[object]) -> list[object]:
        items = receiver.only()
        (source,) = receiver.incoming
        if type(items) is not list:
            raise PayloadError(f"rank {source} sent {type(items).__name__} instead of a list")
        if len(items) != len(object_list):
            raise PayloadError(f"rank {source} sent {len(items)} objects, but object_list has {len(object_list)}")
        object_list[:] = items
        return object_list

    return fill


def _is_sequence(value: object) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))
