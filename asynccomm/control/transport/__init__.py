"""How messages of the control channel travel: sockets, framing, connections, and the thread for them."""
