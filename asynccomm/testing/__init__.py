"""Testing programs that use asynccomm: the pytest plugin and the conformance suite for backends."""
