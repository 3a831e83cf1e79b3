"""Fixtures of the rendezvous."""

from tests.control.conftest import quiet

__all__ = ["quiet"]
