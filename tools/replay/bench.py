"""A small model whose ViT and language model are timed apart, pass by pass, on whatever micro-batch it is given."""

import time
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from transformers import InternVLConfig, PreTrainedConfig

from omnibal.cost import Load
from omnibal.data.collate import pack_samples
from omnibal.vlm import Payload, VisionLanguageModel, load_model
from omnibal.vlm.loss import token_losses

SHORTER = 16
"""So many times fewer patches a tile, and tokens a text, than in the data."""
TOKENS_PER_TILE = 256 // SHORTER
WARM_UP, IMAGE_TOKEN = 3, 3
SHAPES: dict[str, tuple[dict[str, int], dict[str, int]]] = {
    "large ViT": (
        {"hidden_size": 160, "intermediate_size": 640, "num_hidden_layers": 4, "num_attention_heads": 4},
        {"hidden_size": 96, "intermediate_size": 288, "num_hidden_layers": 3, "num_attention_heads": 4},
    ),
    "large LLM": (
        {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
        {"hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 3, "num_attention_heads": 4},
    ),
}


def config_of(shape: str) -> PreTrainedConfig:
    """An InternVL of one of the shapes."""
    vision, text = SHAPES[shape]
    more = {"model_type": "qwen2", "vocab_size": 512, "max_position_embeddings": 65_536, "num_key_value_heads": 2}
    return InternVLConfig(
        vision_config=vision | {"image_size": 112, "patch_size": 14},
        text_config=text | more,
        image_token_id=IMAGE_TOKEN,
        tie_word_embeddings=False,
    )


class Bench:
    """The model of a configuration on this machine.

    On a CPU seconds are the processor's, so that other programs hardly count; on CUDA they are those of the clock.
    """

    def __init__(self, config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> None:
        torch.manual_seed(0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.dtype, self.model = dtype, load_model(config)
        modules = [record.module for record in self.model.records]
        self._merge = modules.index("language")
        self._layers = nn.ModuleList(
            self.model.build_layer(index, seed=0, dtype=dtype, device=self.device) for index in range(len(modules))
        )

    def warm_up(self) -> None:
        """Run some packs that do not count."""
        for _ in range(WARM_UP):
            self.seconds(Pack((3, 0), (200, 100)))

    def seconds(self, pack: "Pack") -> tuple[float, float, float, float]:
        """Seconds of the phases, in the order of ``omnibal.advise.costs.PHASES``."""
        made = pack_samples(
            pack.samples(self.model), pad_token_id=0, pixel_shape=self.model.pixel_shape, pixel_dtype=self.dtype
        )
        payload = Payload.of_pack({name: tensor.to(self.device) for name, tensor in made.items()}, self.dtype)
        marks = [self._now()]
        for layer in self._layers[: self._merge]:
            payload = layer(payload)
        marks.append(self._now())
        cut = payload.with_floats(lambda tensor: tensor.detach().requires_grad_())
        features, state = cut.hidden, cut
        for layer in self._layers[self._merge :]:
            state = layer(state)
        loss = token_losses(state.hidden, cut.input_ids).sum()
        marks.append(self._now())
        loss.backward()
        marks.append(self._now())
        if payload.hidden.requires_grad and features.grad is not None:
            torch.autograd.backward(payload.hidden, features.grad)
        marks.append(self._now())
        first, second, third, fourth = (after - before for before, after in pairwise(marks))
        return first, second, third, fourth

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


@dataclass(frozen=True)
class Pack:
    """The tiles and the tokens of each sample of a micro-batch."""

    tiles: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def load(self) -> Load:
        """What it holds."""
        return Load(sum(self.tiles), sum(self.lengths), sum(length**2 for length in self.lengths))

    def samples(self, model: VisionLanguageModel) -> list[dict[str, Any]]:
        """Random tokens behind those of the images, random pixels."""
        generator, found = torch.Generator().manual_seed(0), []
        for tiles, length in zip(self.tiles, self.lengths, strict=True):
            ids = torch.randint(4, 512, (length,), generator=generator)
            ids[: tiles * TOKENS_PER_TILE] = IMAGE_TOKEN
            pixels = torch.randn(tiles, *model.pixel_shape, generator=generator) if tiles else None
            found.append({"input_ids": ids, "labels": ids, "pixel_values": pixels})
        return found


def pack_of(units: list[int], tokens: list[int], *, padded: bool) -> Pack:
    """A micro-batch of samples, so many times shorter; where padded, every sample is as long as the longest."""
    short = [u * TOKENS_PER_TILE + max((t - u * 256) // SHORTER, 2) for u, t in zip(units, tokens, strict=True)]
    return Pack(tuple(units), tuple([max(short)] * len(short) if padded else short))
