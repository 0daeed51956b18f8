"""Our cut against DeepSpeed's on two processes, in one run; see README.md."""

from statistics import median

import torch.distributed as dist
from bench import Case, Packs, Timings, measure_link, measure_model, time_steps
from markdown import table
from models import MODELS
from reality import LIMITS, MINUTES, heading, make_parser, predict, sampled, start

from omnibal.cost import CostModel
from omnibal.pipeline.partition import search_partition
from omnibal.pipeline.profile import ModelProfile

METHODS = ("uniform", "parameters", "paper", "search")


def main() -> None:
    """Measure the model's profile, cut it by each method, time all cuts in turn."""
    parser = make_parser(__doc__)
    parser.add_argument("model", choices=("ViT-heavy", "LLM-heavy"))
    arguments = parser.parse_args()
    start()
    config, packs = MODELS[arguments.model], sampled("balanced")
    profile, share = measure_model(config, LIMITS)
    link = measure_link()
    cuts = find_cuts(profile, packs, link)
    cases = [Case(" and ".join(methods), partition, packs) for partition, methods in cuts.items()]
    timings = time_steps(config, cases, rounds=arguments.rounds, minutes=MINUTES, report=print)
    if dist.get_rank() == 0:
        predicted = [predict(profile, case, link) for case in cases]
        print(f"\n### {arguments.model}\n\n{heading(share, link)}\n\n{report(cases, predicted, timings)}\n")


def find_cuts(profile: ModelProfile, packs: Packs, link: CostModel) -> dict:
    """Partitions, each with the methods that find it."""
    cuts: dict = {}
    for method in METHODS:
        found = search_partition(
            profile, [packs.load], dist.get_world_size(), method=method,
            bandwidth_bytes_per_second=1 / link.llm_tokens, latency_seconds=link.fixed,
        )  # fmt: skip
        cuts.setdefault(found.best.partition, []).append(method)
    return cuts


def report(cases: list[Case], predicted: list[float], timings: list[Timings]) -> str:
    """A row per cut, relative to that of the search."""
    middles = [median(timing.seconds) if timing.seconds else float("nan") for timing in timings]
    ours = next(middle for case, middle in zip(cases, middles, strict=True) if "search" in case.name)
    rows = []
    for case, seconds, middle, timing in zip(cases, predicted, middles, timings, strict=True):
        spread = f"{1e3 * min(timing.seconds):,.0f} … {1e3 * max(timing.seconds):,.0f}" if timing.seconds else "–"
        cells = f"{1e3 * middle:,.0f}", spread, f"{1e3 * seconds:,.0f}", f"{middle / ours:.2f}"
        rows.append((case.name, " ".join(map(str, case.partition.boundaries)), *cells))
    return table(("method", "boundaries", "measured ms", "fastest … slowest", "predicted ms", "of ours"), rows)


if __name__ == "__main__":
    main()
