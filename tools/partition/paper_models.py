"""The OmniBal paper's models and its Tables 4 and 9, with costs counted for A100s, and the setting of all reports."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from omnibal.cluster import Cluster, Links
from omnibal.data.limits import PackLimits
from omnibal.device import DEVICES, Device
from omnibal.families.tiled import internvl_records
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import LayerCost, ModelProfile

# The setting that all reports of the paper's models share; what deviates from it says so.
# It was fitted, and the reports were made, with costs as they were counted until 2026-11-28: without memory traffic.
FRACTION = 0.477
"""Of the device's peak: with it the last row of the paper's Table 7 comes out; fitted there and nowhere else."""
DEVICE = replace(DEVICES["A100-80GB"], fraction=FRACTION, memory_bytes=80 * 2**30)
VISION_FACTOR = 1.5
"""Times as long as counted that ViT layers take, by the paper's Figure 2, where tensor parallelism does not divide
their heads; elsewhere they take as long as counted."""
NETWORK = 20e9
"""Bytes per second, between stages as between replicas."""
LIMITS = PackLimits(9, 4096)
MICRO_BATCHES = 64
"""Of a replica's step: 1024 samples in the baseline's batches of four, as InternVL-1.5 trains."""
SAMPLES_PER_PACK = 4.65
"""Of the made-up mix, under the limits."""
OVERHEAD = 2 * 2**30
"""What a device holds beside the model; it is filled to its last byte otherwise, without head room."""


def cluster_of(num_devices: int, memory_bytes: int) -> Cluster:
    """So many devices, all of which talk over the network."""
    return Cluster(1, num_devices, DEVICE, memory_bytes=memory_bytes, overhead_bytes=OVERHEAD, links=Links(NETWORK))


def _vision(hidden: int, layers: int, heads: int, intermediate: int, **others: Any) -> dict[str, Any]:
    """Tiles of 448 pixels in patches of 14: 1025 tokens."""
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | {"intermediate_size": intermediate, "image_size": [448, 448], "patch_size": [14, 14]} | others


def _language(hidden: int, layers: int, intermediate: int, heads: int, vocab: int) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": intermediate}
    return sizes | {
        "model_type": "llama", "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": vocab,
    }  # fmt: skip


VISION = {
    "InternVL-6B": _vision(3200, 45, 25, 12800, use_qk_norm=True, norm_type="rms_norm"),
    "EVA-CLIP-1B": _vision(1408, 40, 16, 6144),
    "EVA-CLIP-4B": _vision(1792, 64, 16, 15360),
    "EVA-CLIP-8B": _vision(4096, 32, 32, 20480),
    "EVA-CLIP-18B": _vision(5120, 48, 40, 25600),
}
LANGUAGE = {
    "Llama3-8B": _language(4096, 32, 14336, 32, 128256),
    "InternLM2-20B": _language(6144, 48, 16384, 48, 92544),
    "Yi-34B": _language(7168, 60, 20480, 56, 64000),
    "Llama3-70B": _language(8192, 80, 28672, 64, 128256),
    "Qwen1.5-110B": _language(8192, 80, 49152, 64, 152064),
}


@dataclass(frozen=True)
class Published:
    """A row of the paper's Table 9: blocks of each stage, those of the ViT first."""

    vision: str
    language: str
    tensor_parallel: int
    num_replicas: int
    blocks: tuple[int, ...]

    @property
    def name(self) -> str:
        """As the table calls it."""
        return f"{self.vision} + {self.language}"


BASELINE = Published("InternVL-6B", "InternLM2-20B", 2, 4, (22, 23, 24, 24))
TABLE_9 = (
    Published("InternVL-6B", "Llama3-8B", 1, 8, (16, 17, 20, 24)),
    BASELINE,
    Published("InternVL-6B", "Yi-34B", 4, 2, (28, 29, 24, 24)),
    Published("InternVL-6B", "Llama3-70B", 4, 2, (22, 23, 13, 14, 14, 14, 13, 12)),
    Published("InternVL-6B", "Qwen1.5-110B", 8, 1, (21, 22, 13, 13, 14, 14, 14, 14)),
    Published("EVA-CLIP-1B", "InternLM2-20B", 2, 4, (43, 16, 15, 14)),
    Published("EVA-CLIP-4B", "InternLM2-20B", 2, 4, (39, 22, 21, 20)),
    Published("EVA-CLIP-8B", "InternLM2-20B", 2, 4, (17, 18, 23, 22)),
    Published("EVA-CLIP-18B", "InternLM2-20B", 4, 4, (18, 19, 25, 34)),
)
TABLE_4 = {
    # spreads of parameters (B), layers and forward time (ms); what is sent beyond the first row (MB); GPU days
    "parameters": (0.03, 13.4, 93.6, 0.0, 42.2),
    "layers": (0.64, 1.2, 20.1, 8.2, 30.6),
    "profile": (0.85, 2.1, 6.5, 16.6, 30.9),
    "BMP": (0.83, 1.5, 12.2, -21.0, 29.0),
}


def counted_profile(
    row: Published,
    *,
    device: Device = DEVICE,
    vision_factor: float | None = None,
    image_size: int = 448,
    frozen: Sequence[str] = (),
) -> ModelProfile:
    """The row's model in bfloat16.

    Args:
        row: Which model, on how many devices a layer.
        device: What it runs on.
        vision_factor: How many times as long as counted a layer of the ViT takes; left out, the setting says it.
        image_size: Pixels of a tile's side.
        frozen: What is not trained.
    """
    config = {
        "vision_config": VISION[row.vision] | {"image_size": [image_size] * 2},
        "text_config": LANGUAGE[row.language],
        "tie_word_embeddings": False,
    }
    profile = analytic_profile(internvl_records(config), device, tensor_parallel=row.tensor_parallel, frozen=frozen)
    factor = factor_of(row) if vision_factor is None else vision_factor
    layers = [scaled(layer, factor) if layer.module != "language" else layer for layer in profile.layers]
    return replace(profile, layers=tuple(layers))


def factor_of(row: Published) -> float:
    """What a ViT layer of the row takes in the setting, of what is counted."""
    return VISION_FACTOR if VISION[row.vision]["num_attention_heads"] % row.tensor_parallel else 1.0


def scaled(layer: LayerCost, factor: float) -> LayerCost:
    """A layer that takes so many times as long."""
    return replace(
        layer,
        forward_seconds=factor * layer.forward_seconds,
        backward_seconds=factor * layer.backward_seconds,
        weight_seconds=factor * layer.weight_seconds,
        recompute_seconds={},
    )


def block_places(profile: ModelProfile) -> list[int]:
    """Layer numbers of what the paper counts: blocks of the ViT and of the LLM."""
    return [i for i, layer in enumerate(profile.layers) if layer.kind in ("vision_block", "decoder_block")]


def blocks_of(profile: ModelProfile, boundaries: Sequence[int]) -> tuple[int, ...]:
    """Blocks of each stage."""
    places = block_places(profile)
    return tuple(sum(a <= place < b for place in places) for a, b in pairwise(boundaries))
