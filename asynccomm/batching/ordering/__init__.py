"""Ranks that agree on one order of operations: codec, protocol, and the messages that carry it."""
