"""Sound files: samples and rate from the header alone, and the samples of one channel at the model's rate."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from omnibal.errors import require, said
from omnibal.families.base import SoundHeader
from omnibal.formats.images import named


def sound_header(sound: Path | bytes) -> SoundHeader:
    """Samples of a channel and samples a second, of a file or its content, without decoding it."""
    with _opened(sound) as opened:
        header = SoundHeader(len(opened), int(opened.samplerate))
    if header.samples < 1:  # a pipe's or a damaged header states none
        raise ValueError(f"sound must have samples, got none in {named(sound)}")
    return header


def load_sound(sound: Path | bytes, rate: int) -> npt.NDArray[np.float32]:
    """The decoded sound, its channels averaged, at ``rate`` samples a second; as many samples as `resampled` says."""
    from scipy.signal import resample_poly

    with _opened(sound) as opened:
        samples = opened.read(dtype="float32", always_2d=True).mean(axis=1)
        given = int(opened.samplerate)
    if given == rate:
        return np.asarray(samples, dtype=np.float32)
    common = gcd(given, rate)
    return np.asarray(resample_poly(samples, rate // common, given // common), dtype=np.float32)


@contextmanager
def _opened(sound: Path | bytes) -> Iterator[Any]:
    """A sound that is open; whatever is wrong with it, here or where it is used, is a ``ValueError`` that names it."""
    require("soundfile")
    import soundfile

    rule, name = "have a readable header", named(sound)
    if isinstance(sound, Path) and not sound.is_file():
        raise ValueError(f"sound must exist, got {name}")
    try:
        with soundfile.SoundFile(BytesIO(sound) if isinstance(sound, bytes) else str(sound)) as opened:
            rule = "be decodable"
            yield opened
    except MemoryError:
        raise
    except Exception as error:  # decoders fail in any way that damaged bytes lead them to
        raise ValueError(f"sound must {rule}, got {name} ({said(error)})") from error
