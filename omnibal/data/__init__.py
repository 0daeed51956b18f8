"""Data balance: which samples share a micro-batch, and in which order they run."""
