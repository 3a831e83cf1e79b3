"""Facts about all ranks in few bytes: equal, and equally distant, values of ranks in order take hardly any.

All ranks read such tables, so with a number of bytes for each rank the bytes of all would be the square of the number
of ranks. The names, addresses and ports of ranks usually differ by numbers that grow in steps. A table therefore has a
text as its form and its numbers (``node-017`` is the form ``node-``, and 0 and 17), and lists of numbers as their
differences from row to row, equal lists once, all of it compressed.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Final, NamedTuple, TypeAlias, final

from msgspec import Meta

from asynccomm.control.transport.schema import Message, MessageError, dumps, loads, shown
from asynccomm.control.transport.topology import TEXT_CHARACTERS

LEVEL: Final = 6  # of the compression

_NUMBER: Final = re.compile("0|[1-9][0-9]{0,14}")  # a text's leading zeros are numbers of their own

Value: TypeAlias = int | str
Place: TypeAlias = Annotated[int, Meta(ge=0)]  # of a list in the table


@final
class _Texts(Message, frozen=True):
    """A column of texts."""

    forms: list[list[str]]  #: the different ones, as the pieces between the numbers
    form_of: Place  #: a list with the form of each row
    numbers: list[list[Place]]  #: of each form a list for each of its numbers, with the rows of that form


@final
class _Table(Message, frozen=True):
    lists: list[list[int]]  #: of numbers, as differences
    columns: list[Place | _Texts]  #: a column of numbers is the place of a list


@final
class _Lists:
    """The different lists of a table that is written."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}

    def place(self, numbers: Iterable[int]) -> int:
        """The place of a list, which is added if there is no equal one."""
        before = 0
        differences = []
        for number in numbers:
            differences.append(number - before)
            before = number
        return self._places.setdefault(tuple(differences), len(self._places))

    @property
    def all(self) -> list[list[int]]:
        """The lists, in the order of their places."""
        return [list(differences) for differences in self._places]


def pack_table(rows: Sequence[Sequence[Value]]) -> bytes:
    """A table of ``rows``, at least one, each column of numbers or of texts."""
    lists = _Lists()
    columns = [_packed(column, lists) for column in zip(*rows, strict=True)]
    return zlib.compress(dumps(_Table(lists.all, columns)).encode(), LEVEL)


def _packed(column: Sequence[Value], lists: _Lists) -> int | _Texts:
    if isinstance(column[0], int):
        return lists.place(number for number in column if isinstance(number, int))
    places: dict[tuple[str, ...], int] = {}
    form_of = []
    numbers: list[list[list[int]]] = []  # by form, for each row
    for text in map(str, column):
        form = tuple(_NUMBER.split(text))
        place = places.setdefault(form, len(places))
        if place == len(numbers):
            numbers.append([])
        numbers[place].append([int(number) for number in _NUMBER.findall(text)])
        form_of.append(place)
    by_form = [[lists.place(column) for column in zip(*of_form, strict=True)] for of_form in numbers]
    return _Texts([list(form) for form in places], lists.place(form_of), by_form)


def unpack_table(data: bytes, kinds: Sequence[type[Value]], size: int, most: int) -> list[tuple[Value, ...]]:
    """The rows of a table of ``size`` ranks with columns of these ``kinds``. Raises: MessageError.

    Args:
        most: bytes that the table has at most, before compression.
    """
    table: _Table = loads(_Table, expanded(data, most))
    if [int if isinstance(column, int) else str for column in table.columns] != list(kinds):
        wanted = ", ".join(kind.__name__ for kind in kinds)
        raise MessageError(f"a table must have the columns {wanted}, got {shown(table.columns)}")
    lists = [list(itertools.accumulate(differences)) for differences in table.lists]
    try:
        for each in table.columns:  # first: texts may take more memory than the table
            rows = len(lists[each if isinstance(each, int) else each.form_of])
            if rows != size:
                raise ValueError(f"they must be of {size} ranks, got {rows}")
        columns = [lists[each] if isinstance(each, int) else _texts(each, lists) for each in table.columns]
        return list(zip(*columns, strict=True))
    except (IndexError, StopIteration, ValueError) as exc:
        raise MessageError(f"the columns of a table must fit each other: {exc}, got {shown(table)}") from None


class _Form(NamedTuple):
    pattern: str
    rows: Iterator[tuple[int, ...]]


def _texts(column: _Texts, lists: Sequence[Sequence[int]]) -> list[str]:
    forms = []
    for pieces, places in zip(column.forms, column.numbers, strict=True):
        if len(pieces) != len(places) + 1 or len(places) + sum(map(len, pieces)) > TEXT_CHARACTERS:
            raise ValueError(f"a form with {len(pieces)} pieces and {len(places)} numbers")
        pattern = "%d".join(piece.replace("%", "%%") for piece in pieces)
        rows = zip(*[lists[at] for at in places], strict=True) if places else itertools.repeat(())
        forms.append(_Form(pattern, rows))
    return [form.pattern % next(form.rows) for form in (forms[at] for at in lists[column.form_of])]


def expanded(data: bytes, most: int) -> bytes:
    """The text that was compressed. Raises: MessageError."""
    expanding = zlib.decompressobj()
    try:
        text = expanding.decompress(data, most)
    except zlib.error as exc:
        raise MessageError(f"a table must be compressed: {exc}") from None
    if not expanding.eof:
        raise MessageError(f"a table must have at most {most} bytes")
    return text
