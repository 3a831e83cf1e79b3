"""Options with torchcomms' names."""

from datetime import timedelta

from torch import distributed as dist

from asynccomm.compat.torchcomms import BatchP2POptions, CommOptions


def test_options_have_defaults_and_can_be_set() -> None:
    options = CommOptions()
    assert (options.abort_process_on_timeout_or_error, options.timeout) == (False, timedelta(seconds=600))
    assert (options.hints, options.store) == ({}, None)
    store = dist.HashStore()
    options.store, options.timeout, options.hints = store, timedelta(seconds=3), {"spin_us": "50"}
    options.abort_process_on_timeout_or_error = True
    assert options.store is store
    assert CommOptions().hints == {}
    assert (BatchP2POptions().hints, BatchP2POptions().timeout) == (None, None)
