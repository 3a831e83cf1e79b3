"""Adapters between asynccomm and other libraries."""
