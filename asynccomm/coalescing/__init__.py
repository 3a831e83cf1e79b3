"""Many operations for the price of one: what is held, how it becomes batches, and ranks that agree on an order."""
