"""A cluster of sleeping devices around DeepSpeed's real engine."""
