"""Tables 7 and 2: 6B + 20B on 32 A100s, simulated and emulated; see README.md."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median
from typing import Annotated

import typer

from omnibal.cost import Load
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.planner.search import Variant
from tools.bench import table
from tools.emulator.run import EmulationTask, run_emulation
from tools.paper.ladder import above_limit, best, fitted, gpu_days, ladder, limits_days
from tools.paper.setting import Setting

PUBLISHED = {"baseline": 61.8, "+ data": 51.9, "+ model": 29.0, "+ memory": 21.3}
COUNTED = Setting(micro_batches=8, vision_factor=1.0)
"""A short step, ViT layers as counted."""
MICRO_BATCHES = (8, 16, 32, 64)
FIGURE_2 = ((4, 2048, (500, 160, 150, 160)), (9, 4096, (900, 300, 260, 270)), (20, 16384, (2000, 1600, 1000, 1100)))
"""The paper's Figure 2: tiles, tokens, and milliseconds of a forward pass through the stages of the baseline's cut."""
app = typer.Typer(help=__doc__)


MicroBatches = Annotated[int, typer.Option(help="Of a step.")]
VisionFactor = Annotated[float, typer.Option(help="How many times as long as counted ViT layers take.")]


@app.command("ladder")
def print_ladder(
    micro_batches: MicroBatches = Setting.micro_batches,
    vision_factor: VisionFactor = Setting.vision_factor,
    fraction: Annotated[float | None, typer.Option(help="Of the peak; fitted by default.")] = None,
) -> None:
    """Print the ladder, and what separates its top from the limits of 1F1B."""
    setting = Setting(micro_batches=micro_batches, vision_factor=vision_factor, fraction=fraction or Setting.fraction)
    setting = setting if fraction else fitted(setting, PUBLISHED["+ memory"])
    spared = replace(best(replace(setting, target_rows=True), "auto"), name="the same, head on target rows")
    rungs = [*_rungs(setting), spared]
    print(f"fraction of the peak: {setting.fraction:.3f}\n\n{_ladder(setting, rungs)}\n")
    print(_limits({rung.name: (setting, rung) for rung in rungs[3:]}))


@app.command()
def real(files: Annotated[list[Path], typer.Argument(help="JSON lists of lengths, as InternVL's parts.")]) -> None:
    """Print the ladder on real lengths, at the same fraction of the peak."""
    setting = Setting(lengths=SampleLengths.from_token_lengths(files))
    rungs = _rungs(setting)
    print(f"{_ladder(setting, rungs)}\n\n{_limits({rung.name: (setting, rung) for rung in rungs[3:]})}")


@app.command()
def emulate(
    rows: Annotated[list[str], typer.Argument(help="Of the ladder: 'baseline', '+ data', …, 'ours, any schedule'.")],
    micro_batches: MicroBatches = Setting.micro_batches,
    steps: Annotated[int, typer.Option(help="Of each row, behind one to warm up.")] = 1,
    slower: Annotated[float, typer.Option(help="Times the least time scale: DeepSpeed's own work weighs less.")] = 2.0,
) -> None:
    """Run rows on DeepSpeed's engine, on sixteen local processes that sleep; a minute or two each."""
    setting = replace(Setting(), micro_batches=micro_batches)
    found = []
    for rung in _rungs(setting):
        if rung.name in rows:
            emulated, predicted = _emulated(setting, rung, steps, slower)
            days = [gpu_days(setting, rung, seconds) for seconds in (predicted, emulated)]
            found.append((rung.name, *_days(days), f"{emulated / predicted - 1:+.1%}"))
    print(table(("", "simulated", "emulated", "emulated over simulated"), found))


@app.command()
def causes() -> None:
    """Print how the ladder depends on the ViT's costs and on the length of a step, and what the paper says of both."""
    rows = []
    dearest = max(_measured_factors())
    for count, factor in ((8, 1.0), (8, 1.5), (16, dearest), (64, 1.0), (64, 1.5)):
        setting = fitted(Setting(micro_batches=count, vision_factor=factor), PUBLISHED["+ memory"])
        days = [gpu_days(setting, rung) for rung in ladder(setting, ours=False)]
        rows.append((f"{count} micro-batches, ViT × {factor:.3g}", *_days(days), f"{setting.fraction:.2f}"))
    paper = ("the paper", *_days(PUBLISHED.values()), "")
    print(table(("", *PUBLISHED, "fraction of peak"), [*rows, paper]))
    print(f"\nViT × in Figure 2: {', '.join(f'{factor:.2f}' for factor in _measured_factors())}")


@app.command()
def longer() -> None:
    """Print the ladder's top for more micro-batches a step."""
    tops, gains = {}, []
    for count in MICRO_BATCHES:
        setting = replace(Setting(), micro_batches=count)
        rungs = _rungs(setting)
        first, *days = (gpu_days(setting, rungs[place]) for place in (0, 3, 4, 5))
        gains.append((f"{count}", *_days((first, *days)), *(f"{first / value:.2f}" for value in days)))
        alike = replace(best(setting, limits=setting.limits), name="ours, the paper's limits")
        tops |= {f"{count}, {rung.name}": (setting, rung) for rung in (rungs[3], alike, *rungs[4:])}
    names = [rung.name for rung in rungs[3:]]
    print(table(("micro-batches", "baseline", *names, *(f"gain, {name}" for name in names)), gains))
    print(f"\n{_limits(tops)}")


def _rungs(setting: Setting) -> list[Variant]:
    """The ladder, and our plan under the fastest schedule that fits."""
    return [*ladder(setting), replace(best(setting, "auto"), name="ours, any schedule")]


def _ladder(setting: Setting, rungs: list[Variant]) -> str:
    rows = []
    for rung in rungs:
        published, days = PUBLISHED.get(rung.name), gpu_days(setting, rung)
        said = (f"{published:.1f}", f"{PUBLISHED['baseline'] / published:.2f}") if published else ("", "")
        gain, idle = f"{gpu_days(setting, rungs[0]) / days:.2f}", f"{rung.bubble_ratio:.0%}"
        cut = " ".join(map(str, rung.plan.partition.boundaries))
        size = f"{rung.load.shape[-1]} × {rung.samples_per_step:.0f}"
        rows.append((rung.name, said[0], f"{days:.1f}", said[1], gain, idle, cut, size, rung.plan.schedule))
    names = (
        "",
        "paper",
        "ours",
        "gain, paper",
        "gain, ours",
        "idle",
        "cut",
        "micro-batches × samples a step",
        "schedule",
    )
    return table(names, rows)


def _emulated(setting: Setting, rung: Variant, count: int, slower: float) -> tuple[float, float]:
    """Mean seconds of a row's first steps on the real engine, by the median step, and as simulated."""
    task = EmulationTask(setting.profile, rung.plan, rung.steps[:count])
    task = replace(task, time_scale=slower * task.least_scale)
    pairs = zip(run_emulation(task).steps, task.predicted, strict=True)
    over = median(emulated.step_seconds / predicted.step_seconds for emulated, predicted in pairs)
    seconds = fmean(step.step_seconds for step in task.predicted)
    return over * seconds, seconds


def _largest(load: Load) -> PackLimits:
    """Limits that no micro-batch exceeds."""
    return PackLimits(int(load.vision_units.max()), int(load.llm_tokens.max()))


def _limits(tops: dict[str, tuple[Setting, Variant]]) -> str:
    rows, reasons = [], {}
    for name, (setting, rung) in tops.items():
        alike, busy = limits_days(setting, rung)
        reasons, days = above_limit(setting, rung), gpu_days(setting, rung)
        shares = [f"{share:+.1%}" for share in (days / alike - 1, *reasons.values())]
        rows.append((name, f"{rung.load.shape[-1]}", *_days((days, alike, busy)), *shares))
    return table(("", "micro-batches", "GPU days", "limit of 1F1B", "all busy", "above 1F1B's limit", *reasons), rows)


def _measured_factors() -> list[float]:
    """How many times as long as counted the ViT takes, beside the LLM, by the times in Figure 2.

    The first stage holds the ViT and one of the LLM's 48 blocks.
    """
    layers, found = COUNTED.profile.layers, []
    for tiles, tokens, (first, *others) in FIGURE_2:
        load = Load(tiles, tokens, tokens**2 / 4)
        vision, language = (
            sum(float(layer.forward_seconds(load)) for layer in layers if layer.kind == kind)
            for kind in ("vision_block", "decoder_block")
        )
        block = sum(others) / 47
        found.append((first - block) / (48 * block) / (vision / language))
    return found


def _days(values: Iterable[float]) -> list[str]:
    return [f"{value:.1f}" for value in values]


if __name__ == "__main__":
    app()
