"""The control channel: exchanges liveness, failures and the states of ranks even while collectives are stuck."""
