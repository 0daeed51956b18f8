"""What each stage keeps for its backward passes, and which layers recompute instead."""
