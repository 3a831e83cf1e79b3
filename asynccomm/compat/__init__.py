"""Async versions of the interfaces of other communication libraries."""
