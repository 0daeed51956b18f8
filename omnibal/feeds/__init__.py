"""Sources without an index: drawn into a buffer on each rank, measured as they come, and planned there."""
