"""A conformance suite for backends: checks that a backend keeps its promises. Needs no pytest; open to third parties.

All ranks run it at the same time, each in its own process or, for loopback, as tasks of one loop::

    async def test_mine(): await check_backend(lambda name: new_comm("mine", name=name))

The data depends on rank and position (which reveals misplaced chunks), outputs are filled with sentinels (which reveal
unwritten elements), and the reference is computed in float64 or int64 from the same data.
"""

from asynccomm.testing.conformance.suite import CHECKS as CHECKS
from asynccomm.testing.conformance.suite import check_backend as check_backend
