"""omnibal pack: how well a dataset packs, and how alike the ranks' work is."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

import typer

from omnibal.cli.files import check_folder, expect
from omnibal.cli.inputs import NamedLengths, read_lengths
from omnibal.cli.options import ClusterOption, JsonOption, LengthsOption, LimitsOption, PlotsOption, read_limits
from omnibal.cli.output import show, show_json
from omnibal.cli.packing import BEFORE, PackingReport, PackingTask, draw_packing
from omnibal.cli.run import Run
from omnibal.config import PackingSection
from omnibal.data.limits import PackLimits, choose_limits
from omnibal.data.policies import Method
from omnibal.errors import ConfigError

REPLICAS = 8
"""Ranks where nothing says how many."""


def pack(
    source: Annotated[
        list[Path],
        typer.Argument(
            help='A ds_config; or, without one, a folder of lengths or JSON lists of {"vit_num", "token_num"}.',
            show_default=False,
        ),
    ],
    lengths: LengthsOption = None,
    limits: LimitsOption = None,
    cluster: ClusterOption = None,
    num_replicas: Annotated[
        int | None, typer.Option(help="Data-parallel ranks; those of the cluster, or 8.", min=1, show_default=False)
    ] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="Packs per rank and step; the ds_config's, or 1.", min=1, show_default=False)
    ] = None,
    method: Annotated[Method | None, typer.Option(help="How packs are made and arranged.", show_default=False)] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Show all methods side by side.")] = False,
    exchange_steps: Annotated[
        int | None,
        typer.Option(
            help="How many consecutive steps may exchange samples for balance; 1 keeps every step as it was drawn.",
            min=1,
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Decides every draw.", min=0, show_default=False)] = None,
    plot: PlotsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Pack a dataset for so many ranks and show how good packs and steps are.

    Packs and the fewest possible; how long ranks wait for the slowest one in
    the ViT and in the LLM (Dist Ratio); how random steps are (χ² per degree of
    freedom: 1 as shuffled, more where steps are sorted); the largest packs.

    Example: omnibal pack ds_configs/mine.json --compare

    Example: omnibal pack runs/lengths --num-replicas 16
    --limits 40,12288 --plot runs/plots
    """
    check_folder("--plot", plot)
    fixed = read_limits(limits)
    run = _run_of(source, lengths, cluster)
    given = {"method": method, "exchange_steps": exchange_steps, "seed": seed}
    packing = PackingSection() if run is None else run.section.packing
    packing = packing.model_copy(update={name: value for name, value in given.items() if value is not None})
    named = read_lengths(source, "source") if run is None else run.named_lengths
    task = PackingTask(
        lengths=named.lengths,
        limits=_limits(named, fixed, packing),
        num_replicas=num_replicas or _replicas(run),
        micro_batches=micro_batches or (1 if run is None else run.num_micro_batches),
        packing=packing,
    )
    shown = get_args(Method) if compare else (packing.method,)
    drawn = tuple(dict.fromkeys((BEFORE, packing.method))) if plot else ()
    results = {name: task.run(name) for name in dict.fromkeys((*shown, *drawn))}
    plots = draw_packing(task, {name: results[name][1] for name in drawn}, named.names, plot) if plot else []
    report = PackingReport(task, [results[name][0] for name in shown], plots)
    if as_json:
        show_json(report.to_record() | {"broken": [asdict(problem) for problem in named.problems]})
    else:
        show(*named.problem_lines(), *report.parts())


def _run_of(source: list[Path], lengths: list[Path] | None, cluster: str | None) -> Run | None:
    """The ds_config that the arguments name; None where they name lengths."""
    remedy = "`omnibal lengths` measures a dataset"
    kind = expect("source", source[0], ("ds_config", "saved lengths", "token lengths"), remedy=remedy)
    if kind != "ds_config":
        for name, value in (("--lengths", lengths), ("--cluster", cluster)):
            if value:
                raise ConfigError(f"{name} must come with a ds_config, got {source[0]} with {name}")
        return None
    if len(source) > 1:
        raise ConfigError(f"source must be one ds_config, got {source[1]} beside {source[0]}")
    return Run.open(source[0], lengths=lengths, cluster=cluster)


def _replicas(run: Run | None) -> int:
    return REPLICAS if run is None or run.known_cluster is None else run.layout().num_replicas


def _limits(named: NamedLengths, fixed: tuple[int, int] | None, packing: PackingSection) -> PackLimits:
    """The limits that were given, those of the ds_config, or the paper's."""
    vision_units, llm_tokens = fixed or (packing.vision_units, packing.llm_tokens)
    limits = choose_limits(named.lengths, vision_units, llm_tokens)
    if fixed is not None or (packing.full_vision_units is None and packing.full_llm_tokens is None):
        return limits
    return PackLimits(
        limits.vision_units,
        limits.llm_tokens,
        full_vision_units=packing.full_vision_units,
        full_llm_tokens=packing.full_llm_tokens,
    )
