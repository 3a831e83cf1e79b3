"""The agreement on a comm's next members: a two-phase commit of a coordinator, the participants and newcomers."""
