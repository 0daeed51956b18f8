"""Candidate plans measured on the real engine, each in processes of its own."""
