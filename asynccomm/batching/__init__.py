"""Many operations for the price of one: how operations that wait become batches, and agree on an order."""
