"""The methods of a Comm, by theme: each class here is a part of it."""
