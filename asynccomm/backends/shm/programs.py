"""Collectives as programs: algorithms as data, which an executor runs.

A program is a few *stages*. Each stage goes through the same number of *steps*, in order, and never overtakes the stage
before it; the first stages run ahead as far as they are ready, so that other ranks wait as little as possible. A step
of a stage waits for flags of other ranks, then takes its *actions* (copies and reductions), then raises a flag of its
own. An action names memory by a :class:`Ref`: a vector of the caller, or a place in the segment.

There are two executors: ``reference.py`` in Python, which is the specification, and ``_core.c``. Both read and write
the same segment, so ranks with either of them can take part in one collective, and their results have the same bits.

The collectives have four forms:

- ``published``: a slot is for all readers (broadcast, all_gather, gather);
- ``exchanged``: a slot holds a part for each reader (scatter, all_to_all_single, with ``announced`` sizes all_to_all),
  which a reader may combine (``scattered_sums``: reduce_scatter);
- ``combined``: small reductions; every rank that needs the result combines all slots;
- ``reduced_in_parts``: large reductions. Each rank combines its part of every step and publishes the result
  (reduce-scatter, then all-gather), chunk by chunk through slots that stay in the caches.

Reductions combine in rank order on every rank, so all ranks hold the same bits. Lengths and offsets are in bytes.

A rank *lends* its tensor if that lies in memory that the others can read (``arena.py``): the tensor stands in for the
rank's slots, or its results. With its first step the rank publishes where the tensor lies, and each reader reads there
in place of the slot; copies from the tensor to the slot, and back, are left out. Only the owner writes a tensor, and
its collective ends when all ranks have finished reading (``Wait.READ``). Each rank lends or does not lend for itself,
so all ranks have the same steps in any case. *Single copy* lends a tensor in any memory of the rank's process: the
kernel copies it (``_single_copy.c``), and the rank publishes its address.

The owner of a tensor may change it as soon as its own operation has failed, perhaps while others still read. It has
set its word ``WITHDRAWN`` before; and a rank that has used lent tensors, or results that other ranks have made of them,
looks at these words behind its last read, and fails where one is set.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, final

from asynccomm.backends.shm.layout import LINE

MOST_STEPS: Final = 2**32 - 1  # of a program


@final
class Space:
    """The memory that a :class:`Ref` lies in; its number is that of a vector or a rank."""

    VECTOR: Final = 0  #: the caller's memory
    SLOT: Final = 1
    RESULT: Final = 2
    RECORD: Final = 3  #: the room for tiny data beside a flag


@final
class Wait:
    """The flags that a step of a stage waits for."""

    NOTHING: Final = 0
    #: this rank may fill its slot; one that lends both its vectors fills none, and need not wait after the first steps
    FREE: Final = 1
    POSTED: Final = 2  #: the stage's ranks have filled their slots, for the same collective
    REDUCED: Final = 3  #: the stage's ranks have filled their results
    READ: Final = 4  #: the stage's ranks have finished reading in the last step, if this rank lends tensors


@final
class Signal:
    """The flag that a step of a stage raises in the end."""

    NOTHING: Final = 0
    POST: Final = 1  #: this rank has filled its slot
    RESULT: Final = 2  #: this rank has filled its result
    FINISH: Final = 3  #: this rank has finished reading


class Ref(NamedTuple):
    """A place in memory: byte ``offset + step * stride`` of a vector, or byte ``offset`` of the step's own memory.

    Where a rank lends a tensor for its slot or result, the place is byte ``lent + step * lent_stride`` of the tensor.
    """

    space: int  #: of :class:`Space`
    number: int
    offset: int = 0
    stride: int = 0
    lent: int = -1  #: -1: no tensor stands in
    lent_stride: int = 0


class Action(NamedTuple):
    """A copy of one source, or a reduction of sources in their order, to ``target``.

    In step i, it moves ``total - i * stride`` bytes, at least 0 and at most ``most``.
    """

    target: Ref
    sources: tuple[Ref, ...]
    total: int
    stride: int
    most: int
    reduction: int = -1  #: number of the reduction; -1 for a copy


class Stage(NamedTuple):
    """One stage of a program."""

    wait: int  #: of :class:`Wait`
    ranks: tuple[int, ...]
    actions: tuple[Action, ...]
    signal: int  #: of :class:`Signal`


class Lending(NamedTuple):
    """The vectors that a rank may lend; -1 for none."""

    slot: int = -1
    result: int = -1
    single_copy: bool = False  #: whether a vector in any memory of the process is lent


class Announced(NamedTuple):
    """Sizes that a pair of ranks alone knows. Each rank publishes its sizes with the first step (``Board.put``).

    A program with them goes on for as many steps as the rank with the most of them needs.
    """

    sends: tuple[int, ...]  #: bytes for each rank
    receives: tuple[int, ...]  #: bytes from each rank
    room: int  #: bytes of a slot for each reader


class Program(NamedTuple):
    """The steps of one rank in a collective."""

    steps: int  #: with ``announced``, those that this rank's data need
    stages: tuple[Stage, ...]
    lending: Lending | None = None  #: None: no rank lends tensors in this collective
    announced: Announced | None = None  #: None: all ranks know all sizes


class Part(NamedTuple):
    """A collective's actions in the two stages of a step: fill the slot, then read others' slots."""

    fill: tuple[Action, ...]
    take: tuple[Action, ...]
    givers: tuple[int, ...]  #: this rank reads the slots of these ranks
    lending: Lending | None = None  #: as in a ``Program``
    readers: tuple[int, ...] = ()  #: the ranks that may read tensors that this rank lends


def steps_for(nbytes: int, per_step: int) -> int:
    """The number of steps for ``nbytes``; an empty collective takes one step, too, because it also synchronizes."""
    return -(-nbytes // per_step) or 1


def room_per_reader(chunk: int, size: int) -> int:
    """Bytes of a slot for each reader, if readers have their own."""
    return chunk // size // LINE * LINE


def program(steps: int, part: Part, *, single_copy: bool = False) -> Program:
    """The program that takes one part through ``steps`` steps.

    Args:
        single_copy: whether tensors that may be lent are lent in any memory.
    """
    stages = [Stage(Wait.FREE, (), part.fill, Signal.POST), Stage(Wait.POSTED, part.givers, part.take, Signal.FINISH)]
    if part.lending is not None:
        stages.append(Stage(Wait.READ, part.readers, (), Signal.NOTHING))
    lending = part.lending and part.lending._replace(single_copy=single_copy)
    return Program(steps, tuple(stages), lending)


def barrier(rank: int, size: int) -> Part:
    """A part without data, which all ranks wait for."""
    return Part((), (), others(rank, size))


def published(
    rank: int,
    source: int | None,
    targets: Sequence[tuple[int, int]],
    room: int,
    lends: bool | None = None,
    readers: tuple[int, ...] = (),
    inline: int = 0,
) -> Part:
    """A part in which this rank's vector is for all readers.

    The vectors: this rank's, if it has one, then one for each target.

    Args:
        source: bytes of this rank's vector; None without.
        targets: the ranks that this rank needs data of, and their bytes.
        room: bytes of a slot.
        lends: whether this rank may lend its vector; None: no rank does.
        readers: the ranks that may read it then.
        inline: bytes of a vector that fit in the record beside the flag, and lie there if no rank lends.
    """
    fill: list[Action] = []
    take: list[Action] = []
    mine = Ref(Space.VECTOR, 0, 0, room)

    def place(giver: int, nbytes: int) -> Ref:
        if lends is None:
            return Ref(Space.RECORD if nbytes <= inline else Space.SLOT, giver)
        return Ref(Space.SLOT, giver, 0, 0, 0, room)

    if source:
        fill.append(_copy(place(rank, source), mine, source, room))
    for number, (giver, nbytes) in enumerate(targets, source is not None):
        target = Ref(Space.VECTOR, number, 0, room)
        if giver != rank:
            take.append(_copy(target, place(giver, nbytes), nbytes, room))
        elif source is not None:
            fill.append(_copy(target, mine, nbytes, room))
    givers = tuple([giver for giver, _ in targets if giver != rank])
    lending = None if lends is None else Lending(0 if lends and source else -1)
    return Part(tuple(fill), tuple(take), givers, lending, readers)


def exchanged(
    rank: int,
    sources: Sequence[tuple[int, int]],
    targets: Sequence[tuple[int, int]],
    room: int,
    row: int = 0,
    *,
    lends: bool = False,
    inline: int = 0,
) -> Part:
    """A part in which a slot holds data for each reader.

    The vectors: one for each source, then one for each target.

    Args:
        sources: the ranks that this rank has data for, and the bytes.
        targets: the ranks that this rank needs data from, and the bytes. Its own data are copied directly.
        room: bytes of a slot for each reader.
        row: bytes for each reader, if each rank's sources are one tensor, for all ranks in their order; tensors may be
            lent then. 0: otherwise.
        lends: whether this rank may lend its tensor.
        inline: bytes for each reader that fit in the record beside the flag, as of ``_part``.
    """
    numbers = {reader: number for number, (reader, _) in enumerate(sources)}
    rest = [(reader, numbers[reader], n) for reader, n in sources if reader != rank]
    fill = _to_readers(rank, rest, room, row, inline)
    take = []
    for number, (giver, nbytes) in enumerate(targets, len(sources)):
        target = Ref(Space.VECTOR, number, 0, room)
        if giver != rank:
            take.append(_copy(target, _part(giver, rank, nbytes, room, row, inline), nbytes, room))
        else:
            fill.append(_copy(target, Ref(Space.VECTOR, numbers[rank], 0, room), nbytes, room))
    givers = tuple([giver for giver, _ in targets if giver != rank])
    return Part(tuple(fill), tuple(take), givers, Lending(0 if lends else -1) if row else None, givers)


def announced(
    rank: int, sends: tuple[int, ...], receives: tuple[int, ...], room: int, *, single_copy: bool = False
) -> Program:
    """The program of an exchange in which only the two ranks know how much one of them has for the other.

    The vectors: the data for each rank, then the places for the data from each rank. A rank copies its own directly.

    Args:
        room: bytes of a slot for each reader.
        single_copy: whether this rank may lend its data, in any memory.
    """
    size, own = len(sends), sends[rank]
    rest = others(rank, size)
    fill = [Action(Ref(Space.VECTOR, size + rank), (Ref(Space.VECTOR, rank),), own, own, own)]

    def part(giver: int, reader: int) -> Ref:
        return Ref(Space.SLOT, giver, reader * room, 0, 0, room)

    fill += [_copy(part(rank, reader), Ref(Space.VECTOR, reader, 0, room), sends[reader], room) for reader in rest]
    take = [_copy(Ref(Space.VECTOR, size + giver, 0, room), part(giver, rank), receives[giver], room) for giver in rest]
    steps = steps_for(max([sends[reader] for reader in rest], default=0), room)
    made = program(steps, Part(tuple(fill), tuple(take), rest, Lending(), rest), single_copy=single_copy)
    return made._replace(announced=Announced(sends, receives, room))


def scattered_sums(
    rank: int, sizes: Sequence[int], room: int, *, direct: bool, lends: bool | None = None, inline: int = 0
) -> Part:
    """The part of a reduce_scatter: each reader combines the data for it.

    The vectors: the data for each rank, then the target.

    Args:
        sizes: bytes of the data for each rank.
        room: bytes of a slot for each reader.
        direct: whether the target is written by the reduction; otherwise it is copied from this rank's result.
        lends: whether the data are one tensor, in equal parts, that this rank may lend; None: no rank does.
        inline: as of ``exchanged``.
    """
    size, nbytes = len(sizes), sizes[rank]
    row = 0 if lends is None else nbytes
    fill = _to_readers(rank, [(reader, reader, sizes[reader]) for reader in others(rank, size)], room, row, inline)
    rows = [_part(giver, rank, nbytes, room, row, inline) for giver in range(size)]
    rows[rank] = Ref(Space.VECTOR, rank, 0, room)
    target = Ref(Space.VECTOR, size, 0, room)
    result = target if direct else Ref(Space.RESULT, rank)
    take = [Action(result, tuple(rows), nbytes, room, room, 0)]
    if not direct:
        take.append(_copy(target, result, nbytes, room))
    rest = others(rank, size)
    return Part(tuple(fill), tuple(take), rest, None if lends is None else Lending(0 if lends else -1), rest)


def combined(rank: int, size: int, nbytes: int, *, takes: bool, copies: bool = False, inline: bool = False) -> Part:
    """The part of a small reduction: every rank that ``takes`` the result combines all slots.

    The vectors: the source, then the target.

    Args:
        copies: the target is copied to a third vector in the end.
        inline: the data lie in the record beside the flag, and not in the slot.
    """
    space = Space.RECORD if inline else Space.SLOT
    fill = [_copy(Ref(space, rank), Ref(Space.VECTOR, 0), nbytes, nbytes)] if nbytes else []
    take: list[Action] = []
    if takes and nbytes:
        rows = tuple([Ref(space, giver) for giver in range(size)])
        take.append(Action(Ref(Space.VECTOR, 1), rows, nbytes, nbytes, nbytes, 0))
        if copies:
            take.append(_copy(Ref(Space.VECTOR, 2), Ref(Space.VECTOR, 1), nbytes, nbytes))
    return Part(tuple(fill), tuple(take), others(rank, size) if takes else ())


def reduced_in_parts(
    rank: int, size: int, nbytes: int, chunk: int, *, takes: bool, lends: bool, single_copy: bool = False
) -> Program:
    """The program of a reduction of any length; only ranks that ``take`` it get the result.

    The vectors: the source, then the target, which may be the source. A rank reads its part of the others' sources only
    before it publishes the result, and the others write theirs only after they have read it: in place is no hazard.

    Args:
        lends: whether ranks may lend their vectors; the same on all ranks.
        single_copy: whether they are lent in any memory.
    """
    most = room_per_reader(chunk, size)
    steps = steps_for(nbytes, most * size)
    share = -(-nbytes // (steps * size * LINE)) * LINE  # all steps are about as large
    step = share * size
    steps = steps_for(nbytes, step) if step else 1

    def bounds(of: int) -> tuple[int, int, int]:
        return max(0, nbytes - of * share), step, share

    source = [Ref(Space.VECTOR, 0, of * share, step) for of in range(size)]
    target = [Ref(Space.VECTOR, 1, of * share, step) for of in range(size)]

    def lent(of: int) -> tuple[int, int]:
        return (of * share, step) if lends else (-1, 0)

    slots = [Ref(Space.SLOT, giver, rank * share, 0, *lent(rank)) for giver in range(size)]
    result = [Ref(Space.RESULT, of, 0, 0, *lent(of)) for of in range(size)]
    fill = [
        Action(Ref(Space.SLOT, rank, of * share, 0, *lent(of)), (source[of],), *bounds(of)) for of in others(rank, size)
    ]
    slots[rank] = source[rank]
    combine = [Action(result[rank], tuple(slots), *bounds(rank), 0)]
    take = []
    if takes:
        combine.append(Action(target[rank], (result[rank],), *bounds(rank)))
        take = [Action(target[of], (result[of],), *bounds(of)) for of in range(size) if of != rank]
    rest = others(rank, size)
    stages = [
        Stage(Wait.FREE, (), tuple(fill), Signal.POST),
        Stage(Wait.POSTED, rest, tuple(combine), Signal.RESULT),
        Stage(Wait.REDUCED if takes else Wait.NOTHING, rest, tuple(take), Signal.FINISH),
    ]
    if not lends:
        return Program(steps, tuple(stages))
    stages.append(Stage(Wait.READ, rest, (), Signal.NOTHING))
    return Program(steps, tuple(stages), Lending(0, 1 if takes else -1, single_copy))


def others(rank: int, size: int) -> tuple[int, ...]:
    """All ranks but ``rank``."""
    return (*range(rank), *range(rank + 1, size))


def _copy(target: Ref, source: Ref, nbytes: int, room: int) -> Action:
    return Action(target, (source,), nbytes, room, room)


def _part(giver: int, reader: int, nbytes: int, room: int, row: int, inline: int) -> Ref:
    """The data of a rank for a reader, in its record or its slot; ``row`` as of ``exchanged``.

    Args:
        inline: bytes for each reader in the record; data that fit lie there if no rank lends.
    """
    if row:
        return Ref(Space.SLOT, giver, reader * room, 0, reader * row, room)
    if nbytes <= inline:
        return Ref(Space.RECORD, giver, reader * inline)
    return Ref(Space.SLOT, giver, reader * room)


def _to_readers(rank: int, data: Sequence[tuple[int, int, int]], room: int, row: int, inline: int) -> list[Action]:
    """Copies of a reader's data: (reader, number of the vector, bytes); the others as of ``_part``."""
    return [
        _copy(_part(rank, reader, nbytes, room, row, inline), Ref(Space.VECTOR, number, 0, room), nbytes, room)
        for reader, number, nbytes in data
    ]
