"""The transport of the control channel: sockets, framing, connections, and the control thread."""
