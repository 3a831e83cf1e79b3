"""The agreement on who goes on: two phases, a coordinator, participants, and processes that join."""
