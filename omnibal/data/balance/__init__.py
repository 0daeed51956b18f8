"""The balanced planner; ALGORITHM.md, beside this file, explains it."""
