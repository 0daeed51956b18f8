"""Does a step ever wait for its images? Processor time of reading, and what training asks for: see README.md."""

import io
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from omnibal.formats.media import load_image
from tools.bench import machine, print_table
from tools.synthetic import patch_lengths, tiled_lengths

LAYOUTS: Final = Path(__file__).parents[1] / "layouts" / "results.json"
KINDS: Final[dict[str, tuple[int, int, str]]] = {
    "448 × 448 JPEG": (448, 448, "JPEG"),
    "photograph, 1024 × 768 JPEG": (1024, 768, "JPEG"),
    "screenshot, 1920 × 1080 PNG": (1920, 1080, "PNG"),
    "scanned page, 2480 × 3508 JPEG": (2480, 3508, "JPEG"),
    "camera, 4000 × 3000 JPEG": (4000, 3000, "JPEG"),
}
"""Width, height and format of the files that are read."""
TILES: Final = GotOcr2ImageProcessorPil(
    crop_to_patches=True, min_patches=1, max_patches=12, size={"height": 448, "width": 448}
)
PATCHES: Final = Qwen2VLImageProcessorPil(size={"shortest_edge": 56 * 56, "longest_edge": 1280 * 28 * 28})
REPEATS: Final = 5


def main() -> None:
    """Print both tables of RESULTS.md."""
    torch.set_num_threads(1)
    print(machine("torch", "transformers", "pillow"), end="\n\n")
    files = {name: picture(*kind) for name, kind in KINDS.items()}
    seconds: dict[str, list[float]] = {"tiles": [], "patches": []}
    rows = []
    for name, file in files.items():
        tiled, tiles = measured(partial(tiles_of, file))
        patched, patches = measured(partial(patches_of, file))
        seconds["tiles"].append(tiled / tiles)
        seconds["patches"].append(patched / patches)
        rows.append(
            (name, f"{len(file) / 2**20:.2f}", f"{1e3 * tiled:.0f} ({tiles})", f"{1e3 * patched:.0f} ({patches})")
        )
    print_table(("file", "MiB", "InternVL, ms (tiles)", "Qwen2.5-VL, ms (patches)"), rows)
    print()
    most = {unit: max(values) for unit, values in seconds.items()}
    print_table(("", "samples/s a device", "processors a device"), list(asked(most)))


def picture(width: int, height: int, form: str) -> bytes:
    """A file of smooth colours with some noise, which compresses about as pictures do."""
    generator = np.random.default_rng(0)
    coarse = Image.fromarray(generator.integers(0, 256, (height // 32 + 1, width // 32 + 1, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.int16)
    noisy = (smooth + generator.integers(-4, 5, smooth.shape)).clip(0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(noisy).save(file, form)
    return file.getvalue()


def tiles_of(file: bytes) -> Tensor:
    """A file's tiles as InternVL takes them, in the dtype that is trained in."""
    return _read(TILES, file)


def patches_of(file: bytes) -> Tensor:
    """A file's patches as Qwen2.5-VL takes them."""
    return _read(PATCHES, file)


def _read(processor: Any, file: bytes) -> Tensor:
    found: Tensor = processor([load_image(file)], return_tensors="pt")["pixel_values"]
    return found.to(torch.bfloat16)


def measured(read: Callable[[], Tensor]) -> tuple[float, int]:
    """Processor seconds of reading, the least of some repeats, and the number of tiles or patches."""
    units, times = len(read()), []
    for _ in range(REPEATS):
        begun = time.process_time()
        read()
        times.append(time.process_time() - begun)
    return min(times), units


def asked(most: dict[str, float]) -> list[tuple[str, ...]]:
    """What the fastest layout of each cell of tools/layouts needs, if all its images were those that take longest."""
    # The dearest kind of file a tile or patch: what needs the most processors.
    lengths = {"InternVL": tiled_lengths(60_000, seed=1), "Qwen": patch_lengths(60_000, seed=1)}
    rows = []
    for cell, result in json.loads(LAYOUTS.read_text())["cells"].items():
        if not result["candidates"]:
            continue
        nodes, devices = ([1, *map(int, result["cluster"].split("x")[:-1])])[-2:]
        rate = max(each["samples_per_second"] for each in result["candidates"]) / (nodes * devices)
        family, unit = ("InternVL", "tiles") if "InternVL" in cell else ("Qwen", "patches")
        units = lengths[family].summary.total_vision_units / len(lengths[family])
        rows.append((cell, f"{rate:.2f}", f"{rate * units * most[unit]:.2f}"))
    return sorted(rows, key=lambda row: -float(row[-1]))


if __name__ == "__main__":
    main()
