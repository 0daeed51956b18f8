"""Samples whose readers get into trouble; readers on a Ray cluster import no more than this module for them."""

import os
import signal
from pathlib import Path

from omnibal.errors import DataError


class TroubledDataset:
    """Another dataset's samples, one of which ends the process that reads it, the first time, and one is broken."""

    def __init__(self, dataset, *, once: Path | None = None, broken=None, deadly=None):
        self._samples, self._lengths = [dataset[index] for index in range(len(dataset))], dataset.lengths()
        self._once, self._broken, self._deadly = once, broken, deadly

    def __len__(self):
        return len(self._samples)

    def __getitem__(self, index):
        if index == self._broken:
            raise DataError(f"image must be decodable, got picture.png (sample {index})")
        if self._once is not None and index == 3 and not self._once.exists():
            self._once.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self._deadly:
            os.kill(os.getpid(), signal.SIGKILL)
        return self._samples[index]

    def lengths(self):
        return self._lengths
