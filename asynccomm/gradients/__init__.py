"""Data-parallel gradients: combined over the ranks in buckets, while backward computes the rest."""
