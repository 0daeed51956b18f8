"""A small model whose ViT and language model are timed apart, pass by pass, on whatever micro-batch it is given."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import InternVLConfig, PreTrainedConfig, Qwen2_5_VLConfig

from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.formats.collate import pack_samples
from omnibal.loss import targets_of
from omnibal.passes import DevicePeak, storage_bytes
from omnibal.vlm import Payload, load_model
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.measure import made_sample

SHORTER = 16
"""So many times fewer patches a tile, and tokens a text, than in the data."""
TOKENS_PER_TILE = 256 // SHORTER
WARM_UP, IMAGE_TOKEN, THREADS = 3, 3, 8
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


def config_of(shape: str, *, native: bool = False) -> PreTrainedConfig:
    """An InternVL of one of the shapes, or a Qwen2.5-VL, whose images have any size."""
    vision, text = SHAPES[shape]
    more = {"vocab_size": 512, "max_position_embeddings": 65_536, "num_key_value_heads": 2}
    if native:
        sizes = {name: vision[name] for name in ("hidden_size", "intermediate_size")}
        sizes |= {"depth": vision["num_hidden_layers"], "num_heads": vision["num_attention_heads"]}
        third = text["hidden_size"] // text["num_attention_heads"] // 2 // 3
        rope = {"rope_type": "default", "mrope_section": [third] * 3}
        return Qwen2_5_VLConfig(
            vision_config=sizes | {"fullatt_block_indexes": [1, 3], "out_hidden_size": text["hidden_size"]},
            text_config=text | more | {"rope_parameters": rope, "tie_word_embeddings": False},
            image_token_id=IMAGE_TOKEN,
        )
    return InternVLConfig(
        vision_config=vision | {"image_size": 112, "patch_size": 14},
        text_config=text | more | {"model_type": "qwen2"},
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
            self.seconds(self.made(Pack((4, 0), (1200, 100))))

    def made(self, pack: "Pack") -> dict[str, Tensor]:
        """What the model reads of a pack, in the host's memory."""
        return pack_samples(
            pack.samples(self.model), pad_token_id=0, pixel_shape=self.model.pixel_shape, pixel_dtype=self.dtype,
            image_integers=self.model.image_integers, positions=self.model.positions,
        )  # fmt: skip

    def measured(self, packs: "Sequence[Pack]") -> tuple[list[tuple[float, ...]], int]:
        """Seconds of each pack's phases, and the most that the passes of one hold; a CPU runs each twice."""
        with ThreadPoolExecutor(THREADS) as threads:  # random pixels take longer than a GPU's passes
            all_made = [*threads.map(self.made, packs)]  # before any is timed
        seconds, held = [], 0
        for made in all_made:
            found, most = self._seconds_and_bytes(made)
            seconds.append(self.seconds(made) if self.device.type == "cpu" else found)  # counting slows a CPU
            held = max(held, most)
        return seconds, held

    def seconds(self, made: dict[str, Tensor]) -> tuple[float, float, float, float]:
        """Seconds of the phases, in the order of ``omnibal.advise.wait.PHASES``."""
        payload = Payload.of_pack({name: tensor.to(self.device) for name, tensor in made.items()}, self.dtype)
        marks = [self._now()]
        for layer in self._layers[: self._merge]:
            payload = layer(payload)
        marks.append(self._now())
        cut = payload.with_floats(lambda tensor: tensor.detach().requires_grad_())
        cut = cut.with_integers(targets_of(cut.input_ids))
        features, state = cut.hidden, cut
        for layer in self._layers[self._merge :]:
            state = layer(state)
        loss = state.hidden
        marks.append(self._now())
        loss.backward()
        marks.append(self._now())
        if payload.hidden.requires_grad and features.grad is not None:
            torch.autograd.backward(payload.hidden, features.grad)
        marks.append(self._now())
        first, second, third, fourth = (after - before for before, after in pairwise(marks))
        return first, second, third, fourth

    def _seconds_and_bytes(self, made: dict[str, Tensor]) -> tuple[tuple[float, ...], int]:
        """Seconds of the phases, and the most that the passes hold beside weights and gradients."""
        weights = list(self._layers.parameters())
        held = weights + [weight.grad for weight in weights if weight.grad is not None]
        with DevicePeak(self.device, held) as peak:
            seconds = self.seconds(made)
        return seconds, peak.peak_bytes - storage_bytes(held)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()


@dataclass(frozen=True)
class Pack:
    """The tiles, or the patches of one image, and the tokens of each sample of a micro-batch."""

    units: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def load(self) -> Load:
        """What it holds."""
        squares = (sum(size**2 for size in sizes) for sizes in (self.lengths, self.units))
        return Load(sum(self.units), sum(self.lengths), *squares)

    def samples(self, model: VisionLanguageModel) -> list[dict[str, Any]]:
        """Random tokens behind those of the images, random pixels."""
        generator = torch.Generator().manual_seed(0)
        return [made_sample(model, *sizes, generator) for sizes in zip(self.units, self.lengths, strict=True)]


def shorter(lengths: SampleLengths, *, native: bool = False, tokens_per_tile: int = TOKENS_PER_TILE) -> SampleLengths:
    """Lengths as the bench runs them; images of any size become squares of whole blocks of patches."""
    units = lengths.vision_units.astype(np.int64)
    if native:
        text = lengths.llm_tokens - units // 4
        units = (np.sqrt(units / SHORTER) / 2).astype(np.int64) ** 2 * 4
        own, squared = units // 4, units**2
    else:
        text, own, squared = lengths.llm_tokens - units * 256, units * tokens_per_tile, None
    return SampleLengths(units, own + np.maximum(text // SHORTER, 2), vision_squared=squared)


def pack_of(short: SampleLengths, samples: list[int], *, padded: bool) -> Pack:
    """A micro-batch of some samples of ``shorter`` lengths; where padded, every one is as long as the longest."""
    units, tokens = (column[samples].tolist() for column in (short.vision_units, short.llm_tokens))
    return Pack(tuple(units), (max(tokens),) * len(tokens) if padded else tuple(tokens))
