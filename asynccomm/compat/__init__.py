"""Other systems' ways to call collectives, to be awaited."""
