"""Files that hosts are told to load; a folder of their own, since hosts put it on Python's path."""
