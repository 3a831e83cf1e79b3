"""Contenders take turns."""

import asyncio

from asynccomm.benchmarks.rounds import LEAST, in_turns, timed
from asynccomm.testing.local import loopback_world


async def test_each_round_has_a_turn_of_each_in_alternating_order() -> None:
    async with loopback_world(2) as (a, b):
        turns: list[tuple[str, int]] = []

        def body(name: str, seconds: float):
            async def turn(count: int) -> float:
                turns.append((name, count))
                return seconds * count

            return turn

        async def nothing(count: int) -> float:
            return 0.0

        us, _ = await asyncio.gather(
            in_turns(a, {"one": body("one", 0.03), "two": body("two", 0.0001)}, 2),
            in_turns(b, {"one": nothing, "two": nothing}, 2),
        )
    assert {name: round(value) for name, value in us.items()} == {"one": 30000, "two": 100}
    estimates, measured = turns[:4], turns[4:]
    assert estimates == [("one", 2), ("one", LEAST), ("two", 2), ("two", LEAST)]
    assert [name for name, _ in measured[1::2]] == ["one", "two", "two", "one"]
    assert measured[1] == ("one", LEAST)
    assert measured[3][1] > 500  # the quick one has more of its operations in a round


async def test_the_clock_is_around_the_calls() -> None:
    counts: list[int] = []

    async def run(count: int) -> None:
        counts.append(count)

    assert 0 <= await timed(run)(7) < 10
    assert counts == [7]
