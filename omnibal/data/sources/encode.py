"""Rendered conversations as token ids and labels, images expanded to their tokens."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from omnibal.data.sources.chat import Rendered

IGNORED = -100
"""Label of a token that carries no loss, as in transformers."""

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


class Encoded(NamedTuple):
    """Token ids (tokens,) and which of them carry loss; every image is still one token."""

    ids: Ids
    is_target: Mask

    def expanded(self, image_token_id: int, image_tokens: Sequence[int]) -> "Encoded":
        """With ``image_tokens[k]`` tokens in place of image ``k``'s one."""
        times = np.ones_like(self.ids)
        times[self.ids == image_token_id] = image_tokens
        return Encoded(np.repeat(self.ids, times), np.repeat(self.is_target, times))

    @property
    def labels(self) -> Ids:
        """Ids of the targets, -100 elsewhere, (tokens,); the first token has nothing before it to be told from."""
        labels = np.where(self.is_target, self.ids, IGNORED)
        labels[:1] = IGNORED
        return labels


def encode(tokenizer: Any, samples: Sequence[Rendered]) -> list[Encoded]:
    """Tokenises texts as they stand: special tokens are those that the texts hold.

    A token is a target if its last character is: one that joins the end of a prompt to the begin of an answer (the
    space before a word) holds what the model is to say.
    """
    if not samples:
        return []
    batch = tokenizer(
        [sample.text for sample in samples],
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
    )
    return [
        Encoded(np.array(ids, dtype=np.int64), _within(np.array(offsets).reshape(-1, 2), sample.targets))
        for ids, offsets, sample in zip(batch["input_ids"], batch["offset_mapping"], samples, strict=True)
    ]


def _within(offsets: npt.NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> Mask:
    """Which tokens, given by (start, stop) of their characters, end in one of some spans."""
    inside = np.zeros(len(offsets), dtype=np.bool_)
    for start, stop in spans:
        inside |= (offsets[:, 1] > start) & (offsets[:, 1] <= stop)
    return inside
