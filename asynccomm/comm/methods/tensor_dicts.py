"""Dicts of tensors, with structure and contents in one message; and the state of modules."""

from __future__ import annotations

import asyncio
import math
import struct
import zlib
from collections.abc import Awaitable, Generator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, SupportsIndex, TypeVar, final

import torch
from torch import Tensor

from asynccomm.comm.methods.base import MAX_BYTES, CommBase, ReceivePolicy, check_type, wrong_kind
from asynccomm.comm.methods.collectives import Collectives
from asynccomm.comm.methods.state_dict import StateReceiver
from asynccomm.core.handles import Handle
from asynccomm.core.tasks import detach
from asynccomm.core.work import Work
from asynccomm.errors import AsyncCommError, PayloadError, WouldBlockError
from asynccomm.ops import Call, Op, Parcel, Parcels, SendParcel
from asynccomm.ops.validation import CommInfo, check_rank, check_tag
from asynccomm.options import check_bool, duration
from asynccomm.serialization.objects import IncomingObject, PayloadKind, encode, kind_of, reading
from asynccomm.serialization.tensor_dicts import (
    EVERYBODY,
    DictSkeleton,
    ReceiverSchemaCache,
    Schema,
    SchemaKey,
    Slices,
    TensorMeta,
    describe,
)

_STATUS: Final = struct.Struct("<?I251s")  # whether the share is here, CRC-32 of the tensors to gather, why it is not
State = TypeVar("State", bound=torch.nn.Module | Mapping[str, Tensor])


class TensorDicts(CommBase):
    """Dicts of tensors. Common to all of these methods:

    - Keys are strings or other plain data; their order is kept. Values are tensors of any dtypes, shapes and strides;
      dicts, lists and tuples of values; and all other objects, which are sent as by the methods for objects: see
      ``Objects`` for ``weights_only`` and ``max_bytes``.
    - Everything goes in one message, the tensors straight into the memory of new tensors. A new tensor is on the comm's
      device if the sent tensor was on the sender's, else on the CPU. A tensor that occurs twice in the dict
      arrives as one tensor.
    - The structure of a dict (keys, shapes, dtypes) is sent once while it does not change: the last 16 structures are
      cached per receiver and tag, and per root.
    - The result is built when the result of the Work is first read. A dict that is not accepted raises PayloadError on
      that rank alone, or on all ranks of an ``all_gather_group``, and the comm goes on. Cancelling the await is safe:
      the operation goes on.
    """

    def broadcast_tensor_dict(
        self,
        tensor_dict: dict[Any, Any] | None,
        root: SupportsIndex,
        *,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[dict[Any, Any]]:
        """Give all ranks the ``tensor_dict`` of rank ``root``; the ``tensor_dict`` of other ranks is ignored.

        Returns: Work of a new dict; on the root of ``tensor_dict`` itself.
        """
        giver = check_rank(self._group, "root", root)
        policy = ReceivePolicy.of(weights_only, max_bytes)
        op = Parcels("broadcast_tensor_dict", giver=giver)
        if giver == self.rank:
            described = describe(_checked(tensor_dict), self.device)
            channel = EVERYBODY, EVERYBODY
            return self._submit_dict(op, channel, described, tensor_dict, weights_only, timeout, hints, tag)
        receiver = _DictReceiver(op.method, self._group, EVERYBODY, policy, self._received_schemas, None)
        return self._submit(Call(op, (), (), None, receiver.finish, place=receiver), timeout, hints, tag)

    def send_tensor_dict(
        self,
        tensor_dict: dict[Any, Any],
        dst: SupportsIndex,
        tag: SupportsIndex = 0,
        *,
        all_gather_group: Collectives | None = None,
        all_gather_tensors: Mapping[Any, bool] | None = None,
        weights_only: bool = True,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[None]:
        """Send ``tensor_dict`` to rank ``dst``, which receives it by :meth:`recv_tensor_dict` under the same ``tag``.

        Dicts and objects sent to the same rank under the same tag keep their order.

        Args:
            all_gather_group: a comm of ranks that all have the same tensors, and that each send them to another rank of
                a group of the same size: each rank then sends one share of each tensor, and the receivers gather the
                shares. Tensors are shared this way if the group's size divides their number of elements.
            all_gather_tensors: exceptions, by key of ``tensor_dict``: whether to share the tensors under that key, also
                nested ones. False is required for tensors that differ among the ranks of the group.
        """
        op = SendParcel("send_tensor_dict", check_rank(self._group, "dst", dst), check_tag(tag))
        group = all_gather_group
        check_bool("weights_only", weights_only)
        check_type("all_gather_group", group, Collectives | None, "a Comm")
        if all_gather_tensors is not None and not isinstance(all_gather_tensors, Mapping):
            raise TypeError(f"all_gather_tensors must be a mapping of keys to bools, got {all_gather_tensors!r}")
        slices = None if group is None else Slices(group.size, group.rank, all_gather_tensors or {})
        described = describe(_checked(tensor_dict), self.device, slices)
        return self._submit_dict(op, (op.peer, op.tag), described, None, weights_only, timeout, hints)

    def recv_tensor_dict(
        self,
        src: SupportsIndex | None = None,
        tag: SupportsIndex = 0,
        *,
        all_gather_group: Collectives | None = None,
        weights_only: bool = True,
        max_bytes: int = MAX_BYTES,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
    ) -> Work[dict[Any, Any]] | GatheredDict:
        """Receive a dict that rank ``src`` sends by :meth:`send_tensor_dict` under ``tag``. The call posts the receive.

        Args:
            src: None: the first dict under ``tag`` from any rank; a backend that does not support this raises
                ``ValueError``.
            all_gather_group: a comm of the same size as the sender's group, in which this rank has the sender's number;
                required if the sender gave a group. This rank receives a share of each tensor, and gathers the rest
                from the group. Awaiting calls a short ``all_gather_single`` of the group when the dict has arrived, and
                one for each shared tensor, in the order of the keys: all ranks of the group must await at the same
                place among their calls on the group. If one rank does not accept its share, or gets other tensors, the
                dict raises PayloadError on all ranks of the group, and the group goes on.

        Returns: a Work of the dict; with ``all_gather_group`` a GatheredDict, to be awaited like a Work.
        """
        op = self._receive_op("recv_tensor_dict", src, tag)
        group = all_gather_group
        check_type("all_gather_group", group, Collectives | None, "a Comm")
        policy = ReceivePolicy.of(weights_only, max_bytes)
        receiver = _DictReceiver(op.method, self._group, op.tag, policy, self._received_schemas, group)
        work = self._submit(Call(op, (), (), None, receiver.finish, place=receiver), timeout, hints)
        return work if group is None else GatheredDict(work, receiver, group, timeout)

    def broadcast_state(
        self,
        state: State,
        root: SupportsIndex,
        *,
        timeout: float | timedelta | None = None,
        hints: Mapping[str, str] | None = None,
        tag: str | None = None,
    ) -> Work[State]:
        """Copy all tensors of rank ``root``'s ``state`` into the tensors of the same names on all ranks, in place.

        Names, shapes and dtypes must be the same on all ranks, in any order; so must the groups of names that stand for
        one tensor (tied weights, which are sent once). A rank with another state raises a PayloadError that lists the
        differences, no tensor of its state is changed, and the comm goes on. Cancelling the await is safe.

        Args:
            state: a module, for all parameters and buffers in its ``state_dict()``, or a mapping of names to tensors on
                the comm's device. A value that is no tensor raises a TypeError with its name. A module with a
                ``state_dict()`` of copies, such as ``FullyShardedDataParallel``, cannot receive: ValueError.

        Returns: Work of ``state``.
        """
        giver = check_rank(self._group, "root", root)
        receiver = StateReceiver(self._group, state, written=giver != self.rank)
        op = Parcels("broadcast_state", giver=giver)
        if giver == self.rank:
            call = Call(op, (), (), state, parcels=(Parcel(receiver.head, tuple(receiver.tensors)),))
        else:
            call = Call(op, (), (), state, place=receiver, expected=sum([tensor.nbytes for tensor in receiver.tensors]))
        return self._submit(call, timeout, hints, tag)

    def _submit_dict(
        self,
        op: Op,
        channel: SchemaKey,
        described: DictSkeleton,
        result: object,
        weights_only: bool,
        timeout: float | timedelta | None,
        hints: Mapping[str, str] | None,
        tag: str | None = None,
    ) -> Work[Any]:
        head, tensors = b"", described.tensors
        if described.values:
            head, more = encode(PayloadKind.TENSOR_DICT, described.values, "tensor_dict", weights_only=weights_only)
            tensors.extend(more)
        now = self._submitter.sends_now(p2p=op.p2p)
        with self._sent_schemas.heading(channel, described.schema, now=now) as heading:
            parcel = Parcel(heading + head, tuple(tensors))
            return self._submit(Call(op, (), (), result, parcels=(parcel,)), timeout, hints, tag)


def _checked(tensor_dict: Any) -> dict[Any, Any]:
    check_type("tensor_dict", tensor_dict, dict, "a dict")
    return tensor_dict  # type: ignore[no-any-return]


@final
class _DictReceiver:
    """Receives one dict: the ``place`` of its receive."""

    def __init__(
        self,
        method: str,
        own: CommInfo,
        tag: int,
        policy: ReceivePolicy,
        schemas: ReceiverSchemaCache,
        group: Collectives | None,
    ) -> None:
        self._method, self._own, self._tag, self._policy, self._schemas = method, own, tag, policy, schemas
        self._group = group
        self._source = 0
        self._schema: Schema | None = None
        self._values: IncomingObject | None = None
        self._tensors: list[Tensor] = []
        self.arrived: bool = False  #: whether the tensors have arrived
        self.shares: list[tuple[Tensor, Tensor]] = []  #: flat tensors to gather, each with the share that is received

    def __call__(self, source: int, head: bytes, lengths: Mapping[int, int]) -> Sequence[Tensor]:
        length = lengths[source]
        if (kind := kind_of(source, head)) is not PayloadKind.TENSOR_DICT:
            raise wrong_kind(self._method, self._own.rank, source, kind)
        schema, rest = self._schemas.read((source, self._tag), head)
        self._policy.check(source, len(head) + length)
        for meta in schema.metas:
            if meta.parts:
                self._check_share(source, meta)
        if rest:
            self._values = IncomingObject(source, rest, length - schema.nbytes)
        elif length != schema.nbytes:
            raise PayloadError(f"rank {source} sent {length} bytes of tensors that have {schema.nbytes}")
        self._source, self._schema = source, schema
        with reading(source), torch.inference_mode(False):  # ordinary tensors, also in inference mode
            places = [self._place(meta) for meta in schema.metas]
        return places if self._values is None else [*places, *self._values.places]

    def _check_share(self, source: int, meta: TensorMeta) -> None:
        group = self._group
        share = f"rank {source} sent share {meta.part} of {meta.parts} of a tensor"
        if group is None:
            raise PayloadError(f"{share}, but no all_gather_group was given here")
        if group.size != meta.parts or group.rank != meta.part:
            raise PayloadError(f"{share}, but this is rank {group.rank} of {group.size} in all_gather_group")

    def _place(self, meta: TensorMeta) -> Tensor:
        device = self._own.device if meta.on_device else "cpu"
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        self._tensors.append(tensor)
        if not meta.parts:
            return tensor
        whole = tensor.view(-1)
        share = whole.view(meta.parts, -1)[meta.part]
        self.shares.append((whole, share))
        return share

    def finish(self, _: object) -> dict[Any, Any]:
        """The dict. Raises: PayloadError."""
        assert self._schema is not None
        self.arrived = True
        values = [] if self._values is None else self._values.decode(weights_only=self._policy.weights_only)
        with reading(self._source):
            return self._schema.build(self._tensors, values)


@final
class GatheredDict(Handle, Awaitable[dict[Any, Any]]):
    """A dict whose shares this rank receives and then gathers with the ranks of a group.

    Before gathering, the ranks of the group exchange the state of their shares: a rank that refused its dict does not
    know the tensors that the others are about to gather, and the others cannot get the share that it discarded.
    """

    _instead = "await it here, and send the dict there"

    def __init__(
        self, work: Work[dict[Any, Any]], receiver: _DictReceiver, group: Collectives, timeout: float | timedelta | None
    ) -> None:
        self._work, self._receiver, self._group, self._timeout = work, receiver, group, timeout
        self._task: asyncio.Task[dict[Any, Any]] | None = None  # goes on when an await is cancelled

    def __await__(self) -> Generator[Any, None, dict[Any, Any]]:
        if self._task is None:
            self._task = detach(asyncio.ensure_future(self._gathered()))
        yield from asyncio.wait([self._task]).__await__()
        return self._task.result()

    def wait(self, timeout: float | timedelta | None = None) -> dict[Any, Any]:
        """Block the thread until the dict is there, while the comm's loop runs in another thread. See ``Work.wait``."""
        limit = None if timeout is None else duration("timeout", timeout)
        if asyncio._get_running_loop() is not None:
            raise WouldBlockError(f"wait() would block the event loop of this thread: use `await` on {self!r}")
        task = asyncio.run_coroutine_threadsafe(self._shared(), self._work._mailbox.loop)
        return task.result(None if limit == math.inf else limit)

    async def _shared(self) -> dict[Any, Any]:
        return await self

    async def _gathered(self) -> dict[Any, Any]:
        refusal, result = None, {}
        try:
            result = await self._work
        except AsyncCommError as exc:
            refusal = exc
            if not self._receiver.arrived:
                with suppress(AsyncCommError):  # the group itself may be broken
                    self._exchange(exc)
                raise
        problem = await self._problem() if self._group.size > 1 else None
        if problem is None:
            await self._gather()
        if refusal is not None:  # of the objects beside the tensors: the shares are complete
            raise refusal
        if problem is not None:
            raise PayloadError(problem)
        return result

    async def _gather(self) -> None:
        gathers = [
            self._group.all_gather_single(whole, share, timeout=self._timeout) for whole, share in self._receiver.shares
        ]
        for gather in gathers:
            await gather

    def _exchange(self, refusal: Exception | None) -> Work[Tensor]:
        """Start to exchange with the group whether this rank has its share, and if not, why."""
        wholes = [(str(whole.dtype), whole.numel()) for whole, _ in self._receiver.shares]
        reason = b"" if refusal is None else str(refusal).encode()
        status = bytearray(_STATUS.pack(refusal is None, zlib.crc32(repr(wholes).encode()), reason))  # cut if too long
        mine = torch.frombuffer(status, dtype=torch.uint8).to(self._group.device)
        return self._group.all_gather_single(None, mine, timeout=self._timeout)

    async def _problem(self) -> str | None:
        """The reason why the ranks of the group cannot gather the dict; None: they can."""
        group, status = self._group, await self._exchange(None)
        forms = {}
        for rank, row in enumerate(status.view(group.size, -1).tolist()):
            received, forms[rank], reason = _STATUS.unpack(bytes(row))
            if not received:
                text = reason.rstrip(b"\0").decode(errors="replace")
                return f"rank {rank} of comm {group.name!r} could not receive its share of the dict: {text}"
        others = [rank for rank, form in forms.items() if form != forms[group.rank]]
        if not others:
            return None
        return f"the dicts of ranks {others} of comm {group.name!r} have other tensors to be gathered than this rank's"

    def __repr__(self) -> str:
        return f"<{self._work!r}, then {len(self._receiver.shares)} all_gathers>"
