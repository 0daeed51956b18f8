"""Make the plans of ds_configs anew, by `omnibal plan` on made-up lengths: python -m tools.configs.plans [name ...]."""

import sys
from collections.abc import Callable
from pathlib import Path
from runpy import run_path
from shutil import copyfile
from tempfile import TemporaryDirectory

import numpy as np

from omnibal.cli.main import app
from omnibal.cli.options import open_workspace
from omnibal.data.lengths import SampleLengths
from tools.synthetic import INTERNVL_MIX, TOKENS_PER_TILE, patch_lengths, tiled_lengths

DATASETS = Path(__file__).parents[1] / "paper" / "datasets.py"
SAMPLES = 100_000
LLAVA_TOKENS, LLAVA_LONGEST = 576, 2048


def llava_lengths() -> SampleLengths:
    """LLaVA-665K for LLaVA 1.5: an image is one tile of 576 tokens; a sample ends after 2048, as LLaVA cuts it."""
    drawn = tiled_lengths(SAMPLES, seed=1, sources=INTERNVL_MIX[:1])
    text = drawn.llm_tokens - TOKENS_PER_TILE * drawn.vision_units
    images = np.minimum(drawn.vision_units, 1)
    tokens = np.minimum(LLAVA_TOKENS * images + text, LLAVA_LONGEST)
    return SampleLengths(images, tokens, target_tokens=np.minimum(drawn.target_tokens, tokens))


def in_twelve_tiles() -> SampleLengths:
    """InternVL's mix with its images cut as InternVL3 cuts them."""
    lengths: SampleLengths = run_path(str(DATASETS))["cut_into"](12)  # by its path: Hugging Face has a module datasets
    return lengths


LENGTHS: dict[str, Callable[[], SampleLengths]] = {
    "internvit-6b-llama-20b-32gpu": lambda: tiled_lengths(SAMPLES, seed=1),
    "internvit-6b-llama-34b-32gpu": lambda: tiled_lengths(SAMPLES, seed=1),
    "internvl3-8b-8gpu": in_twelve_tiles,
    "qwen2.5-vl-7b-8gpu": lambda: patch_lengths(SAMPLES, seed=1),
    "qwen2.5-vl-7b-spread-8gpu": lambda: patch_lengths(SAMPLES, seed=1),
    "qwen2.5-vl-7b-units-8gpu": lambda: patch_lengths(SAMPLES, seed=1),
    "qwen3-vl-8b-8gpu": lambda: patch_lengths(SAMPLES, seed=1),
    "llava-1.5-7b-lora-2gpu": llava_lengths,
}
"""By the name of a configuration."""


def main(names: list[str]) -> None:
    """Plan for each configuration, into ds_configs/plans."""
    for name in names or LENGTHS:
        with TemporaryDirectory() as folder:
            LENGTHS[name]().save(Path(folder))
            config, plan = f"ds_configs/{name}.json", f"ds_configs/plans/{name}.json"
            made = open_workspace(Path(config)).kept_plan
            app(["plan", config, "--lengths", folder], standalone_mode=False)
            copyfile(made, plan)


if __name__ == "__main__":
    main(sys.argv[1:])
