"""The agreement on a comm's next members: a two-phase commit of a coordinator and its participants."""
