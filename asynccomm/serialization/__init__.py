"""Objects and dicts of tensors as parcels, and back."""
