"""Rearranging samples over data-parallel ranks, after each rank has drawn its own: the pure part."""
