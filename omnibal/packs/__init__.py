"""How samples become a pack that is exact: collators, what keeps samples apart, the proof, the loss."""
