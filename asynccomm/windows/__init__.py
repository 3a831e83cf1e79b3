"""Windows: memory of one rank that the other ranks read and write without its help, and signals that go with it."""
