"""Sounds: samples and rate from a file's header, samples at the model's rate, and what a model makes of them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from math import gcd
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from omnibal.errors import require, said
from omnibal.families.base import SoundHeader, SoundRule
from omnibal.families.sounds import resampled
from omnibal.formats.chat import Picture
from omnibal.formats.images import named

if TYPE_CHECKING:
    from torch import Tensor


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


class SoundFormat:
    """The feature extractor of a model's folder, the rule that follows from it, and the token of a piece of a sound."""

    def __init__(self, extractor: Any, rule: SoundRule, token: str) -> None:
        self._extractor, self.rule, self.token = extractor, rule, token

    def features(self, sounds: Sequence[Picture], headers: Sequence[SoundHeader]) -> "dict[str, Tensor]":
        """The sounds of a sample as the model takes them, by the names of its arguments.

        ``input_features`` (sounds, mel bins, frames) float32 and ``feature_attention_mask`` (sounds, frames) int32,
        padded to the longest sound that the extractor knows.
        """
        samples = [self.decoded(sound, header) for sound, header in zip(sounds, headers, strict=True)]
        made = self._extractor(
            samples, sampling_rate=self._extractor.sampling_rate, padding="max_length", return_attention_mask=True,
            return_tensors="pt",
        )  # fmt: skip
        return {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}

    def decoded(self, sound: Picture, header: SoundHeader) -> npt.NDArray[np.float32]:
        """A sound's samples at the model's rate; a ``ValueError`` where they are not those that its header says."""
        rate = self._extractor.sampling_rate
        samples = load_sound(sound, rate)
        if len(samples) != resampled(header, rate):
            raise ValueError(f"sound must decode to the length that its header says, got another: {named(sound)}")
        return samples
