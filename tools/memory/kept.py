"""Predicted against measured kept bytes, for every language model, precision and level on a CPU; see README.md."""

from functools import partial

import numpy as np
import torch
from transformers import InternVLConfig

from omnibal.cost import Load
from omnibal.data.limits import PackLimits
from omnibal.formats.collate import pack_samples
from omnibal.passes import kept_bytes
from omnibal.profile.records import LEVELS, ModelProfile
from omnibal.vlm import VisionLanguageModel, load_model
from omnibal.vlm.measure import measure_profile
from omnibal.vlm.payload import Payload, run_layer
from tools.bench import table
from tools.partition.models import IMAGE_TOKEN, MODELS, TOKENS_PER_TILE, make_sample

TEXTS = ("qwen2", "qwen3", "llama", "mistral")
"""Language models of InternVL's and LLaVA's families; each under a plain and under an InternViT-6B-like ViT."""
VISIONS = {"plain": {}, "RMS norms on queries and keys": {"use_qk_norm": True, "norm_type": "rms_norm"}}
LIMITS = PackLimits(8, 400)
PACKS = (((3, 90), (0, 41), (1, 77)), ((0, 200),), ((5, 130), (2, 60), (1, 30)))
"""Of each pack its samples' tiles and tokens; none is among those that the profile was measured on."""


def main() -> None:
    """Print the largest and the mean error of every model and level."""
    torch.set_num_threads(1)
    rows, worst = [], 0.0
    for text in TEXTS:
        for name, options in VISIONS.items():
            for dtype in (torch.float32, torch.bfloat16):
                errors = _errors(load_model(_config(text, options)), dtype)
                worst = max(worst, *(float(np.abs(each).max()) for each in errors))
                cells = [f"{100 * np.abs(each).mean():.3f} / {100 * np.abs(each).max():.3f}" for each in errors]
                rows.append((text, name, str(dtype).removeprefix("torch."), *cells))
    print(table(("language model", "ViT", "dtype", *(f"{level}: mean / most %" for level in LEVELS)), rows))
    print(f"\nmost of all {100 * worst:.3f} %")


def _config(text: str, vision: dict) -> InternVLConfig:
    """A small model of two blocks of each kind."""
    config = MODELS["mixed"].to_dict()
    language = config["text_config"] | {"model_type": text, "num_hidden_layers": 2, "layer_types": None}
    vit = config["vision_config"] | {"num_hidden_layers": 2} | vision
    return InternVLConfig(
        vision_config=vit, text_config=language, image_token_id=IMAGE_TOKEN, image_seq_length=TOKENS_PER_TILE,
        tie_word_embeddings=False,
    )  # fmt: skip


def _errors(model: VisionLanguageModel, dtype: torch.dtype) -> list[np.ndarray]:
    """For each level the errors of all layers on all packs, of layers that keep anything."""
    profile = measure_profile(model, LIMITS, dtype=dtype)
    return [np.concatenate([_on_pack(model, profile, pack, level, dtype) for pack in PACKS]) for level in LEVELS]


def _on_pack(model: VisionLanguageModel, profile: ModelProfile, shapes: tuple, level: str, dtype: torch.dtype) -> list:
    samples = [make_sample(tiles, tokens, seed) for seed, (tiles, tokens) in enumerate(shapes)]
    pack = pack_samples(samples, pad_token_id=0, pixel_shape=model.pixel_shape)
    tokens = [tokens for _, tokens in shapes]
    load = Load(sum(tiles for tiles, _ in shapes), sum(tokens), sum(size**2 for size in tokens))
    payload = Payload.of_pack(pack, dtype)
    errors = []
    for index, cost in enumerate(profile.layers):
        layer = model.build_layer(index, seed=0, dtype=dtype)
        payload = payload.replace(hidden=payload.hidden.detach().requires_grad_(index > 0))
        free = [*layer.parameters(), *layer.buffers(), *payload.integers.values()]
        run = partial(run_layer, layer, payload, level)
        found = kept_bytes(lambda run=run: run().hidden, free=free)
        predicted = float(cost.saved_bytes[level](load))
        if found or predicted >= 1:
            errors.append(predicted / found - 1 if found else np.inf)
        with torch.no_grad():
            payload = layer(payload)
    return errors


if __name__ == "__main__":
    main()
