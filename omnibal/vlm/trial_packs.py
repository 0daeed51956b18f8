"""Packs of made-up samples, to run layers on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.payload import Payload

_SHARES = (0.25, 0.5, 1.0)
_MANY = 4


@dataclass(frozen=True)
class TrialPack:
    """The sizes of a pack.

    Args:
        tiles: Images' tiles; their tokens are part of the samples.
        lengths: Tokens of each sample, at least one sample.
    """

    tiles: int
    lengths: tuple[int, ...]

    @property
    def tokens(self) -> int:
        """Of all samples."""
        return sum(self.lengths)

    @property
    def load(self) -> Load:
        """What it holds."""
        return Load(self.tiles, self.tokens, sum(length**2 for length in self.lengths))

    def payload(
        self, model: VisionLanguageModel, *, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0
    ) -> Payload:
        """The input of a model's first layer, with random pixels and tokens."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(model.config.text_config.vocab_size, (self.tokens,), generator=generator)
        image = int(model.config.image_token_id)
        ids[ids == image] = 0 if image else 1
        ids[: self.tiles * image_tokens_per_tile(model)] = image
        lengths = torch.tensor(self.lengths)
        pack = {
            "pixel_values": torch.randn(self.tiles, *model.pixel_shape, generator=generator).to(dtype),
            "input_ids": ids[None],
            "position_ids": torch.cat([torch.arange(length) for length in self.lengths])[None],
            "cu_seq_lens": torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32),
        }
        return Payload.of_pack({name: tensor.to(device) for name, tensor in pack.items()}, dtype)


def image_tokens_per_tile(model: VisionLanguageModel) -> int:
    """Tokens that a tile brings to the language model."""
    return next(
        record.sizes["image_tokens_per_tile"] for record in model.records if "image_tokens_per_tile" in record.sizes
    )


def trial_packs(model: VisionLanguageModel, limits: PackLimits) -> list[TrialPack]:
    """Packs of a quarter, a half and all of the limits, each as one sample with images and as four without.

    So what grows with tiles, with tokens and with their squares can be told apart. A pack has no more tiles than its
    tokens can hold, and no sample is longer than the model's positions. The last pack is the largest.
    """
    longest = int(model.config.text_config.max_position_embeddings)
    packs = []
    for share in _SHARES:
        tokens = max(1, round(limits.llm_tokens * share))
        tiles = min(round(limits.vision_units * share), tokens // image_tokens_per_tile(model))
        packs.append(TrialPack(0, _split(tokens, min(_MANY, tokens), longest)))
        packs.append(TrialPack(tiles, _split(tokens, 1, longest)))
    return packs


def _split(tokens: int, samples: int, longest: int) -> tuple[int, ...]:
    samples = max(samples, -(-tokens // longest))
    size, larger = divmod(tokens, samples)
    return (size + 1,) * larger + (size,) * (samples - larger)
