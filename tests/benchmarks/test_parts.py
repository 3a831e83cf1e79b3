from asynccomm.benchmarks.parts import uneven


def test_the_last_part_is_three_times_the_first() -> None:
    assert uneven(400, 2) == [100, 300]
    assert uneven(1, 3) == [1, 1, 1]
    assert uneven(10, 1) == [10]
