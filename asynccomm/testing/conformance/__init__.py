"""Does a backend keep its promises? One suite for all of them, free of pytest, for third parties as well.

Every rank runs it at the same time, in its own process or, for loopback, as tasks of one loop::

    async def test_mine(): await check_backend(lambda name: new_comm("mine", name=name))

It uses data that depends on rank and position (so that chunks in the wrong place show), outputs filled with sentinels
(so that elements nobody wrote show), and a reference computed in float64 or int64 from the same data.
"""

from asynccomm.testing.conformance.suite import CHECKS as CHECKS
from asynccomm.testing.conformance.suite import check_backend as check_backend
