"""Claims, from several threads."""

from concurrent.futures import ThreadPoolExecutor

from asynccomm.backends.claims import Claim


def test_one_of_many_threads_has_it() -> None:
    with ThreadPoolExecutor(4) as threads:
        for _ in range(50):
            claim = Claim(4)
            receives = [object() for _ in range(4)]
            taken = list(threads.map(claim.take, receives))
            assert sum(taken) == 1
            assert claim.winner is receives[taken.index(True)]
            assert not any(claim.give_up() for _ in range(4))


def test_it_fails_with_the_last_backend_unless_it_is_taken() -> None:
    claim = Claim(2)
    assert [claim.give_up(), claim.give_up()] == [False, True]
    claim = Claim(2)
    assert not claim.give_up()
    assert claim.take(claim)
    assert not claim.give_up()
