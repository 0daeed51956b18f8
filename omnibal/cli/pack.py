"""omnibal pack: how well a dataset packs, and how alike the ranks' work is."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, get_args

import typer
from rich.console import Console

from omnibal.cli.dataset import BrokenOption, CacheOption, ImagesOption, MaxTilesOption
from omnibal.cli.outputs import check_folder
from omnibal.data.policies import EXCHANGE_STEPS, ITERATIONS, Method, Oversized
from omnibal.errors import ConfigError

CEILING = 2
"""A search without a ceiling tries limits up to this many times the paper's."""


def pack(
    lengths: Annotated[
        list[Path],
        typer.Argument(
            help='JSON lists of {"vit_num", "token_num"}; or a folder that `omnibal lengths` wrote; or a dataset: an '
            "InternVL meta file or LLaVA's annotations (with --model).",
            show_default=False,
        ),
    ],
    vision_units: Annotated[
        int | None,
        typer.Option(help="Most vision units (tiles, patches) in a pack; the paper's rule chooses.", min=0),
    ] = None,
    llm_tokens: Annotated[
        int | None, typer.Option(help="Most LLM tokens in a pack; the paper's rule chooses.", min=1)
    ] = None,
    search: Annotated[
        bool,
        typer.Option(
            "--search",
            help="Search the limits that waste least, with --vision-units and --llm-tokens as the ceiling (left out: "
            "twice the paper's), or under --budget.",
        ),
    ] = False,
    profile: Annotated[
        Path | None, typer.Option(help="A profile of the model: then also how much memory a micro-batch takes.")
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="For --search, with --profile: GiB that a micro-batch may keep for its backward pass, in all layers, "
            "nothing recomputed.",
            min=0,
        ),
    ] = None,
    num_replicas: Annotated[int, typer.Option(help="Data-parallel ranks.", min=1)] = 8,
    micro_batches: Annotated[int, typer.Option(help="Packs per rank and step.", min=1)] = 1,
    method: Annotated[Method, typer.Option(help="How packs are made and arranged.")] = "balanced",
    compare: Annotated[bool, typer.Option("--compare", help="Show all methods side by side.")] = False,
    seed: Annotated[int, typer.Option(help="Decides every draw.", min=0)] = 0,
    epoch: Annotated[int, typer.Option(help="Which epoch; each draws other packs.", min=0)] = 0,
    oversized: Annotated[
        Oversized, typer.Option(help="Samples over a limit: alone in a pack, refused, or left out.")
    ] = "alone",
    exchange_steps: Annotated[
        int,
        typer.Option(
            help="How many consecutive steps may exchange samples for balance; 1 keeps every step as it was drawn.",
            min=1,
        ),
    ] = EXCHANGE_STEPS,
    iterations: Annotated[int, typer.Option(help="Rounds of ISF (the paper's T).", min=1)] = ITERATIONS,
    full_vision_units: Annotated[
        int | None,
        typer.Option(help="Vision units from where on a pack is full, for ISF (the paper's Q'v); its limit.", min=1),
    ] = None,
    full_llm_tokens: Annotated[
        int | None,
        typer.Option(help="Likewise LLM tokens (the paper's Q't); 128 below the limit, or half of it.", min=1),
    ] = None,
    model: Annotated[Path | None, typer.Option(help="The model's folder, for a dataset.")] = None,
    images: ImagesOption = None,
    max_tiles: MaxTilesOption = None,
    broken: BrokenOption = "error",
    cache: CacheOption = None,
    plot: Annotated[Path | None, typer.Option(help="Folder to draw pictures into.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON.")] = False,
) -> None:
    """Pack a dataset for so many ranks and show how good packs and steps are.

    Packs and the fewest possible; how long ranks wait for the slowest one in
    the ViT and in the LLM (Dist Ratio); how random steps are (χ² per degree of
    freedom: 1 as shuffled, more where steps are sorted); the largest packs.

    Example: omnibal pack lengths.json --num-replicas 16 --compare

    Example: omnibal pack runs/lengths --search --vision-units 40
    --llm-tokens 12288 --plot runs/plots

    Example: omnibal pack lengths.json --method isf --iterations 5
    --full-llm-tokens 3840

    Example: omnibal pack runs/lengths --search --profile profile.json
    --budget 20
    """
    from omnibal.cli.inputs import Reading, read_lengths
    from omnibal.cli.packing import (
        BEFORE,
        PackingReport,
        PackingTask,
        draw_packing,
        kept_by,
        search_under,
    )
    from omnibal.data.limit_search import MemoryCeiling
    from omnibal.data.limits import PackLimits, choose_limits

    check_folder("--plot", plot)
    check_folder("--cache", cache)
    if budget is not None and (profile is None or not search or vision_units is not None or llm_tokens is not None):
        raise ConfigError("--budget must come with --search and --profile, without --vision-units and --llm-tokens")
    if budget == math.inf:
        raise ConfigError(f"--budget must be GiB such as 20, got {budget}")
    if search and (full_vision_units is not None or full_llm_tokens is not None):
        raise ConfigError("--full-vision-units and --full-llm-tokens must come without --search, which finds limits")
    kept = None if profile is None else kept_by(profile)
    named = read_lengths(lengths, Reading(model, images, max_tiles, broken, cache=cache))
    limits = choose_limits(named.lengths, vision_units, llm_tokens, factor=CEILING if search else 1)
    ceiling = None if kept is None or budget is None else MemoryCeiling(kept, budget * 2**30)
    scored = search_under(ceiling or limits, named.lengths, num_replicas, method, seed) if search else []
    limits = scored[0].limits if scored else limits
    if full_vision_units is not None or full_llm_tokens is not None:
        limits = PackLimits(
            limits.vision_units,
            limits.llm_tokens,
            full_vision_units=full_vision_units,
            full_llm_tokens=full_llm_tokens,
        )
    task = PackingTask(
        named.lengths, limits, num_replicas, micro_batches, seed, epoch, oversized, exchange_steps, iterations, kept
    )
    shown = get_args(Method) if compare else (method,)
    drawn = tuple(dict.fromkeys((BEFORE, method))) if plot else ()
    results = {name: task.run(name) for name in dict.fromkeys((*shown, *drawn))}
    plots = draw_packing(task, {name: results[name][1] for name in drawn}, named.names, plot) if plot else []
    report = PackingReport(task, [results[name][0] for name in shown], scored, plots)
    if as_json:
        left_out = [asdict(problem) for problem in named.problems]
        typer.echo(json.dumps(report.to_record() | {"broken": left_out}, indent=2, default=str))
    else:
        named.print_problems(Console())
        report.print(Console())
