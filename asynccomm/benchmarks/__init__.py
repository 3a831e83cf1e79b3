"""The measuring code of ``asynccomm bench`` and of the benches: contenders that take turns, and MPI as one of them."""
