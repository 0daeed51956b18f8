"""Two encoders and an LLM: does it suffice to level the encoders' sum, or must packs be level in each?

    python -m tools.sampling.encoders

Ranks wait once a step (``step``: DDP, ZeRO 2) or behind every phase (``phases``: ZeRO 3 and FSDP gather weights
layer by layer, so no rank is in the LLM while another one encodes). Samples are made up: 45 % images, 30 % sounds of
Qwen2.5-Omni's rate, 15 % texts, 10 % with image and sound. Seconds: LLM 55 %, ViT 30 %, sound 15 %.
"""

import numpy as np

from omnibal.cost import CostModel
from omnibal.data.epoch import arrange_epoch
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.metrics import dist_ratio

SAMPLES, LIMITS = 40_000, PackLimits(16384, 8192)
SHARES = {"llm": 0.55, "vision": 0.30, "sound": 0.15}


def samples() -> dict[str, np.ndarray]:
    """Units of each phase, one entry per sample."""
    rng = np.random.default_rng(0)
    kind = rng.choice(4, SAMPLES, p=[0.45, 0.3, 0.15, 0.1])
    patches = np.clip(rng.lognormal(7, 0.7, SAMPLES), 64, 12000).astype(int) // 4 * 4
    units = (np.clip(rng.lognormal(2.2, 0.8, SAMPLES), 0.5, 30) * 50).astype(int)
    vision, sound = np.where(np.isin(kind, (0, 3)), patches, 0), np.where(np.isin(kind, (1, 3)), units, 0)
    text = np.clip(rng.lognormal(4.8, 0.9, SAMPLES), 8, 3000).astype(int)
    return {"llm": text + vision // 4 + sound // 2, "vision": vision, "sound": sound}


def main() -> None:
    """Print a row for each way and number of ranks."""
    units = samples()
    costs = {phase: SHARES[phase] / column.mean() for phase, column in units.items()}
    tokens, vision, sound = units["llm"], units["vision"], units["sound"]
    summed = np.rint(vision + sound * costs["sound"] / costs["vision"]).astype(int)
    ways = {
        "random packs": (SampleLengths(vision, tokens), LIMITS, "random"),
        "ViT and LLM": (SampleLengths(vision, tokens), LIMITS, "balanced"),
        "sum of encoders and LLM": (SampleLengths(summed, tokens), PackLimits(32768, 8192), "balanced"),
        "each apart": (SampleLengths(vision, tokens, sound_units=sound), LIMITS, "balanced"),
    }
    print("| ranks | levelled | Dist Ratio: ViT | sound | LLM | waits, step | waits, phases |")
    for ranks in (8, 64):
        for name, (lengths, limits, method) in ways.items():
            epoch = arrange_epoch(
                lengths, limits, num_replicas=ranks, method=method, cost=CostModel(llm_tokens=costs["llm"])
            )
            loads = {phase: epoch.packs.sums(column)[epoch.steps][..., 0] for phase, column in units.items()}
            seconds = np.stack([costs[phase] * load for phase, load in loads.items()])  # (phases, steps, ranks)
            busy, whole = seconds.sum(axis=0).mean(axis=1).sum(), seconds.sum(axis=0).max(axis=1).sum()
            ratios = [f"{dist_ratio(loads[phase]):.3f}" for phase in ("vision", "sound", "llm")]
            waits = [f"{1 - busy / end:.1%}" for end in (whole, seconds.max(axis=2).sum())]
            print(f"| {ranks} | {name} | {' | '.join([*ratios, *waits])} |")


if __name__ == "__main__":
    main()
