"""How a model's folder turns sounds into what the model reads: by the feature extractor, as a whole processor does."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from omnibal.families.base import SoundHeader, SoundRule
from omnibal.families.sounds import resampled
from omnibal.formats.chat import Picture
from omnibal.formats.images import named
from omnibal.formats.sounds import load_sound


class SoundFormat:
    """A folder's feature extractor, the rule that follows from it, and the token of a piece of a sound."""

    def __init__(self, extractor: Any, rule: SoundRule, token: str) -> None:
        self._extractor, self.rule, self.token = extractor, rule, token

    def features(self, sounds: Sequence[Picture], headers: Sequence[SoundHeader]) -> dict[str, Tensor]:
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
