"""The decision whether a wait begins with a spin."""

from __future__ import annotations

from typing import Final, final

MOST_SKIPPED: Final = 64  # limit of waits in a row without a spin, after spinning has failed


@final
class SpinPolicy:
    """Whether a wait should begin with a spin: after failed spins, exponentially more waits sleep at once."""

    def __init__(self) -> None:
        self._to_skip = 0  # waits without a spin, between two spins
        self._skipped = 0

    def should_spin(self) -> bool:
        """Whether the wait that begins now should spin; the result of the spin is then to be recorded."""
        if self._skipped < self._to_skip:
            self._skipped += 1
            return False
        self._skipped = 0
        return True

    @property
    def sleeps(self) -> bool:
        """Whether the next wait will not spin."""
        return self._skipped < self._to_skip

    def record(self, found: bool) -> None:
        """Note whether a spin has found its operation done."""
        self._to_skip = 0 if found else min(2 * self._to_skip + 1, MOST_SKIPPED)
