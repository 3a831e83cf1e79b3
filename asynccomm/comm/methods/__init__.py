"""The methods of Comm, one mixin class per theme."""
