"""Finding out what the ranks of a comm are at."""

from __future__ import annotations

from datetime import timedelta

from asynccomm.comm.methods.base import CommBase
from asynccomm.control.diagnosis import Diagnosis
from asynccomm.options import seconds

ANSWER_SECONDS = 1.0


class Diagnosing(CommBase):
    """What the ranks are at, also while a collective hangs."""

    async def diagnose(self, *, stacks: bool = False, timeout: float | timedelta = ANSWER_SECONDS) -> Diagnosis:
        """Ask all ranks what they have called last and wait for, where, and for how long. Print what it returns.

        It goes over the control channel, not the transport, and a thread of its own answers: so it works while
        operations hang, while other ranks' event loops are blocked, and on a comm that is broken. A rank that is
        stopped, or whose interpreter lock is held, does not answer, and it is said for how long it was silent. Not
        collective: any rank may ask at any time. Cancelling is safe.

        Args:
            stacks: also the stacks of each rank's main thread and tasks.
            timeout: seconds for the ranks to answer.

        Raises: ClosedError on a closed comm; RuntimeError if this rank has no control channel.
        """
        limit = seconds("timeout", timeout, ANSWER_SECONDS)
        session = self._session
        session.check_loop()
        if session.ended:
            session.check_open()
        if session.reporter is None:
            raise RuntimeError(
                f"comm {self.name!r} has no control channel here (hint control='off', or a warning said why)"
            )
        return await session.reporter.diagnose(limit, stacks=stacks)
