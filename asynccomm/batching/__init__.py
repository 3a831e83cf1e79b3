"""Batching of waiting operations, and agreement among the ranks on one order of operations."""
