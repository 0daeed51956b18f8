"""OrchMLLM's figures with images, sound and text, simulated: modalities.py [composition] [speed] [nodes] [planning].

The mixture is made up after public metadata of the paper's data sets, since their lengths are not published as such:

- LLaVA-1.5's instructions (665,298 samples, 40,688 of them text alone): sizes of COCO, Visual Genome and GQA, OCR-VQA
  and TextVQA in their shares; conversations of 40 to 2048 tokens, lognormal around 170.
- LibriSpeech (281,241 utterances, 960 hours): three quarters around 14.6 seconds, the others from 2 to 13; 3.6 tokens
  of transcript a second.
- AIR-Bench (21,000 questions): sounds of 1 to 30 seconds, lognormal around 8, whose answers do not grow with them.

Models, numbers of ranks, samples a rank and downsampling are the paper's (Table 1, sections 8.1 and 8.3). A phase takes
what its slowest rank computes, forward and backward; communication, memory and what a step takes whatever it holds are
left out.
"""

import sys
import time
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from omnibal.cost import CostModel, IntArray
from omnibal.dispatch.step_plan import Costs, Link, PhaseCosts, StepPlan, plan_step

SAMPLES: Final = (624_610, 40_688, 281_241, 21_000)
"""LLaVA-1.5 with an image and without, LibriSpeech, AIR-Bench."""
SIZES: Final = (((640, 480), 0.58), ((500, 375), 0.26), ((350, 500), 0.13), ((1024, 768), 0.03))
"""Width and height of images, and their share: COCO, Visual Genome, OCR-VQA, TextVQA."""
PATCH: Final = 14
FRAMES_A_SECOND: Final = 50  # of Whisper's encoder, behind its convolutions
STEPS, SEED, RANKS_PER_NODE = 8, 0, 8


@dataclass(frozen=True)
class Tower:
    """A part of Table 1."""

    layers: int
    hidden: int
    inner: int
    is_llm: bool = False

    def cost(self) -> CostModel:
        """Operations of a token and of attention, forward and backward; in a causal LLM half of attention."""
        # A gated layer of three matrices in the LLM, two elsewhere; the LLM has an eighth of the keys and values.
        attention = self.hidden**2 * (2.25 if self.is_llm else 4)
        weights = self.layers * (attention + (3 if self.is_llm else 2) * self.hidden * self.inner)
        if self.is_llm:
            return CostModel(llm_tokens=6 * weights, llm_tokens_squared=6 * self.layers * self.hidden)
        return CostModel(vision_units=6 * weights, vision_squared=12 * self.layers * self.hidden)


@dataclass(frozen=True)
class Model:
    """A model of the paper, and how it trains it."""

    llm: Tower
    vision: Tower
    sound: Tower
    pixels: int
    """Upper bound of an image's sides."""
    merged: tuple[int, int]
    """Patches and frames that become one token."""
    batches: tuple[int, int, int]
    """Samples a rank: balanced, not balanced, in the ablations."""

    def costs(self, vision: str = "longest_first", sound: str = "padded") -> Costs:
        """Images lie one after another; sounds are rows, for the encoder begins with convolutions."""
        encoders = {
            "vision": PhaseCosts(self.vision.cost(), method=vision),
            "sound": PhaseCosts(self.sound.cost(), method=sound),
        }
        return Costs(encoders, PhaseCosts(self.llm.cost(), method="longest_first"), least_gain=0.0)


MODELS: Final = {
    "MLLM-10B": Model(
        Tower(28, 3584, 18944, True), Tower(36, 2048, 8192), Tower(32, 1280, 5120), 448, (1, 2), (80, 65, 75)
    ),
    "MLLM-18B": Model(
        Tower(48, 5120, 13824, True), Tower(40, 2400, 9600), Tower(32, 1280, 5120), 672, (4, 2), (60, 40, 50)
    ),
    "MLLM-84B": Model(
        Tower(80, 8192, 29568, True), Tower(45, 3200, 12800), Tower(48, 3072, 12288), 896, (4, 4), (30, 15, 25)
    ),
}


def mixture(model: Model, count: int, generator: np.random.Generator) -> dict[str, IntArray]:
    """A plan's columns of samples drawn at random from the whole."""
    kind = generator.choice(4, count, p=np.array(SAMPLES) / sum(SAMPLES))
    sides = np.array([size for size, _ in SIZES])[generator.choice(len(SIZES), count, p=[share for _, share in SIZES])]
    sides = sides * generator.uniform(0.85, 1.0, count)[:, None]
    sides *= np.minimum(1, model.pixels / sides.max(axis=1))[:, None]
    patches = np.where(kind == 0, np.ceil(sides / PATCH).prod(axis=1), 0).astype(np.int64)
    read = np.where(generator.random(count) < 0.75, generator.normal(14.6, 1.0, count), generator.uniform(2, 13, count))
    asked = np.clip(generator.lognormal(np.log(8), 0.6, count), 1, 30)
    seconds = np.select([kind == 2, kind == 3], [np.clip(read, 1.3, 24.5), asked], 0.0)
    frames = np.ceil(seconds * FRAMES_A_SECOND).astype(np.int64)
    talk = np.clip(generator.lognormal(np.log(170), 0.9, count), 40, 2048)
    words = np.select([kind <= 1, kind == 2], [talk, 20 + 3.6 * seconds], 60.0).astype(np.int64)
    features = -(-patches // model.merged[0]), -(-frames // model.merged[1])
    tokens = sum(features) + words
    return {
        **{"vision_units": patches, "vision_squared": patches**2, "vision_tokens": features[0]},
        **{"sound_units": frames, "sound_squared": frames**2, "sound_tokens": features[1]},
        **{"llm_tokens": tokens, "target_tokens": words},
    }


def composition() -> None:
    """Figure 3: which share of a sample's tokens is of images and of sound."""
    print(
        "\n| model | tokens of | none | to 25 % | to 50 % | to 75 % | above | mean | standard deviation |\n|"
        + "---|" * 9
    )
    for name, model in MODELS.items():
        sizes = mixture(model, 100_000, np.random.default_rng(SEED))
        for kind in ("vision", "sound"):
            share = sizes[f"{kind}_tokens"] / sizes["llm_tokens"]
            cells = np.histogram(share, [0, 1e-9, 0.25, 0.5, 0.75, 1.01])[0] / len(share)
            told = " | ".join(f"{cell:.1%}" for cell in cells)
            print(f"| {name} | {kind} | {told} | {share.mean():.2f} | {share.std():.2f} |")


def useful_share(
    model: Model, num_ranks: int, batch: int, costs: Costs, phases: tuple[str, ...]
) -> tuple[float, float]:
    """Useful operations over those that pass until the slowest rank is done, and tokens over the same.

    Args:
        model: It computes sounds as padded rows, however samples were divided.
        num_ranks: Ranks.
        batch: Samples that each rank draws.
        costs: How phases are divided.
        phases: Phases that are; others stay as drawn.
    """
    generator, useful, passed, tokens = np.random.default_rng(SEED), 0.0, 0.0, 0.0
    source = np.repeat(np.arange(num_ranks), batch)
    for _ in range(STEPS):
        sizes = mixture(model, len(source), generator)
        plan = plan_step(source, sizes, num_ranks, costs, total_targets=1)
        computed = replace(plan, costs=model.costs())
        for phase, over_mean in computed.imbalance.items():
            mean = operations(model, phase, sizes) / num_ranks
            useful += mean
            passed += mean * over_mean[1 if phase in phases else 0]
        tokens += sizes["llm_tokens"].sum() / num_ranks
    return useful / passed, tokens / passed


def operations(model: Model, phase: str, sizes: dict[str, IntArray]) -> float:
    """Of all samples in a phase, padding not among them."""
    cost = getattr(model, phase).cost()
    if phase == "llm":
        tokens = sizes["llm_tokens"].astype(float)
        return float(cost.llm_tokens * tokens.sum() + cost.llm_tokens_squared * (tokens**2).sum())
    units, squared = sizes[f"{phase}_units"].sum(), sizes[f"{phase}_squared"].astype(float).sum()
    return float(cost.vision_units * units + cost.vision_squared * squared)


def speed(chosen: list[int]) -> None:
    """Figures 8 and 9 with the paper's samples a rank; 10 and 11 with those of its ablations."""
    whole = ("vision", "sound", "llm")
    print("\n| model | ranks | way | useful share | over that without balance | tokens over that |\n|" + "---|" * 6)
    for name, model in MODELS.items():
        balanced, unbalanced, ablated = model.batches
        for num_ranks in chosen or [128, 2560]:
            ways = {
                f"not balanced, {unbalanced} samples a rank": (unbalanced, model.costs(), ()),
                f"OrchMLLM's algorithms, {balanced} samples": (balanced, model.costs(), whole),
                f"not balanced, {ablated} samples": (ablated, model.costs(), ()),
                "LLM alone (Figure 10)": (ablated, model.costs(), ("llm",)),
                "all rmpad: Algorithm 1 (Figure 11)": (ablated, model.costs("longest_first", "longest_first"), whole),
                "all pad: Algorithm 2 (Figure 11)": (ablated, model.costs("padded", "padded"), whole),
                "OrchMLLM's algorithms": (ablated, model.costs(), whole),
                "sound by Algorithm 5": (ablated, model.costs("longest_first", "padded_attention"), whole),
                "vision by Algorithm 4": (ablated, model.costs("least_squares_within", "padded"), whole),
            }
            base = {}
            for way, (batch, costs, phases) in ways.items():
                share, rate = useful_share(model, num_ranks, batch, costs, phases)
                if not phases:
                    base = {"share": share, "rate": rate}
                cells = f"{share:.1%} | {share / base['share']:.2f} | {rate / base['rate']:.2f}"
                print(f"| {name} | {num_ranks} | {way} | {cells} |", flush=True)


def nodes(num_ranks: int) -> None:
    """Figure 13: what the rank with most of it sends to other nodes, with the node-wise step over without it."""
    print("\n| model | ranks | inputs of vision | sound | text | features of vision | sound |\n|" + "---|" * 7)
    node = np.arange(num_ranks) // RANKS_PER_NODE
    for name, model in MODELS.items():
        source = np.repeat(np.arange(num_ranks), model.batches[2])
        generator, sent = np.random.default_rng(SEED), np.zeros((2, 5))
        for _ in range(STEPS):
            sizes = mixture(model, len(source), generator)
            for row, ranks_per_node in enumerate((None, RANKS_PER_NODE)):
                costs = replace(model.costs(), ranks_per_node=ranks_per_node)
                sent[row] += most_sent(plan_step(source, sizes, num_ranks, costs, total_targets=1), node)
        print(f"| {name} | {num_ranks} | {' | '.join(f'{left:.2f}' for left in sent[1] / sent[0])} |", flush=True)


def most_sent(plan: StepPlan, node: IntArray) -> list[float]:
    """What the rank with most sends to other nodes: inputs of both encoders, text, features of both."""
    sizes = plan.sizes
    carried = [(plan.moves[phase], sizes[f"{phase}_units"]) for phase in ("vision", "sound")]
    carried.append((plan.moves["llm"], sizes["target_tokens"]))
    carried += [(plan.features[phase], sizes[f"{phase}_tokens"]) for phase in ("vision", "sound")]
    return [
        float(np.bincount(move.source, np.where(node[move.source] != node[move.destination], size, 0)).max())
        for move, size in carried
    ]


def planning(chosen: list[int]) -> None:
    """Beside Table 2: processor time of a plan of three phases, without and with all choices weighed by a link."""
    model = MODELS["MLLM-10B"]
    bytes_of = {"vision": 6.0 * PATCH**2, "sound": 160.0}, dict.fromkeys(("vision", "sound"), 4.0 * model.llm.hidden)
    print("\n| ranks | plan, ms | with a link, ms |\n|" + "---|" * 3)
    for num_ranks in chosen or [64, 128, 256, 512, 1024, 2560]:
        source = np.repeat(np.arange(num_ranks), 60)
        sizes, taken = mixture(model, len(source), np.random.default_rng(SEED)), []
        for link in (None, Link(1e-4, 25e9, *bytes_of, 24.0)):
            costs, found = replace(model.costs(), link=link), []
            for _ in range(4):  # the first one compiles
                begun = time.process_time()
                _ = plan_step(source, sizes, num_ranks, costs, total_targets=1).features
                found.append(time.process_time() - begun)
            taken.append(1e3 * min(found))
        print(f"| {num_ranks} | {taken[0]:.1f} | {taken[1]:.1f} |", flush=True)


def main() -> None:
    """Print Markdown."""
    parts = [word for word in sys.argv[1:] if not word.isdecimal()] or ["composition", "speed", "nodes", "planning"]
    chosen = [int(word) for word in sys.argv[1:] if word.isdecimal()]
    for part in parts:
        match part:
            case "composition":
                composition()
            case "speed":
                speed(chosen)
            case "nodes":
                nodes(*chosen or [128])
            case "planning":
                planning(chosen)


if __name__ == "__main__":
    main()
