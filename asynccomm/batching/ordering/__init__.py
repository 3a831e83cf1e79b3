"""Agreement of all ranks on one order of operations: codec, protocol, and transport."""
