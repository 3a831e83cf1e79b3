"""The ``asynccomm`` command."""
