"""A learner's step on rollouts of unlike lengths, divided by trainers' own functions and by ours; see README.md."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.multiprocessing as mp
import typer

from omnibal import SampleLengths, balanced_rows
from omnibal.advise.models import Model
from omnibal.advise.wait import Sharding, phase_seconds, wait
from omnibal.cost import Load
from omnibal.device import Device
from omnibal.dispatch.divide import _rollout_costs, divide
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import ModelProfile
from tools.bench import machine, table
from tools.rollouts.measured import OURS, TOKEN_BUDGET, measured_row
from tools.synthetic import tiled_lengths

RESULTS = Path(__file__).with_name("results.json")
MODEL, DEVICE, BUDGET = "InternVL3-8B", "A100-80GB", TOKEN_BUDGET
ANSWERS = 8
DRAWS = {(8, 32): 5, (64, 4): 8, (64, 32): 3, (512, 8): 3, (512, 32): 1}
"""Batches drawn, by number of ranks and rollouts a rank."""
TRL = "TRL 1.16 AsyncGRPO (Σ L², budget)"
KARMARKAR_KARP = "karmarkar_karp on seconds, one cost"
Rows = list[list[Any]]


def rollouts(count: int, seed: int) -> SampleLengths:
    """Prompts as of the InternVL-1.2 mix, each with eight answers: most are short, and few reach 8,192 tokens."""
    prompts = tiled_lengths(count // ANSWERS, seed=seed)
    generator = np.random.default_rng(seed)
    answers = generator.lognormal(6.2, 1.0, count).astype(np.int64).clip(16, 8192)
    tokens = np.minimum(np.repeat(prompts.llm_tokens, ANSWERS).astype(np.int64) + answers, BUDGET)
    return SampleLengths(np.repeat(prompts.vision_units, ANSWERS), tokens)  # a prompt's answers one after another


def as_they_came(lengths: SampleLengths, ranks: int) -> Rows:
    """Each rank trains on what it made, and fills micro-batches in this order up to the budget."""
    rows: Rows = []
    for own in np.array_split(np.arange(len(lengths)), ranks):
        rows.append([[]])
        for rollout in own.tolist():
            if lengths.llm_tokens[rows[-1][-1]].sum() + lengths.llm_tokens[rollout] > BUDGET:
                rows[-1].append([])
            rows[-1][-1].append(rollout)
    most = max(map(len, rows))
    return [rank + [[]] * (most - len(rank)) for rank in rows]


def verls(lengths: SampleLengths, ranks: int) -> Rows:
    """verl: Karmarkar and Karp on 24576·L + L², over ranks as in _balance_batch, then rearrange_micro_batches."""
    import verl.utils.tensordict_utils as tu
    from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions, rearrange_micro_batches

    tokens = torch.tensor(lengths.llm_tokens.astype(np.int64))
    of_ranks = get_seqlen_balanced_partitions(calculate_workload(tokens).tolist(), ranks, equal_size=True)
    batches = [
        tu.get_tensordict(
            {
                "input_ids": torch.nested.as_nested_tensor(
                    [torch.zeros(int(tokens[n])) for n in own], layout=torch.jagged
                )
            }
        )
        for own in of_ranks
    ]
    micro_batches = 1
    while True:  # ranks of verl agree on the largest number by an all-reduce
        parts = [rearrange_micro_batches(batch, BUDGET, min_num_micro_batch=micro_batches)[1] for batch in batches]
        if all(len(part) == micro_batches for part in parts):
            return [[[own[n] for n in part] for part in found] for own, found in zip(of_ranks, parts, strict=True)]
        micro_batches = max(map(len, parts))


def trls(lengths: SampleLengths, ranks: int) -> Rows:
    """TRL: AsyncGRPO's TokenBudgetBatcher, by Σ L² as rollouts arrive; none of them shares a prefix here."""
    from trl.experimental.async_grpo.async_grpo_trainer import TokenBudgetBatcher

    samples = (
        {
            "input_ids": torch.cat([torch.tensor([number]), torch.zeros(int(count) - 1, dtype=torch.long)]),
            "completion_mask": torch.zeros(int(count), dtype=torch.long),
            "group_id": number,
            "number": number,
        }
        for number, count in enumerate(lengths.llm_tokens)
    )
    rows: Rows = [[] for _ in range(ranks)]
    batcher = TokenBudgetBatcher(samples, ranks, BUDGET, {})
    seen = 0
    for micro_batch in batcher:
        for rank, row in zip(rows, micro_batch, strict=True):
            rank.append([sample["number"] for sample in row.samples])
            seen += len(row.samples)
    left = [number for number in range(seen, len(lengths))]  # in rows that wait for more rollouts
    return (
        rows
        if not left
        else [[*rank, last] for rank, last in zip(rows, as_last_rows(lengths, left, ranks), strict=True)]
    )


def as_last_rows(lengths: SampleLengths, left: list[int], ranks: int) -> list[list[int]]:
    """The rows that TRL keeps open, by the same rule: each rollout to the row with least Σ L (L + 1) that has room."""
    rows: list[list[int]] = [[] for _ in range(ranks)]
    tokens = lengths.llm_tokens.astype(np.int64)
    for rollout in left:
        fitting = [row for row in rows if tokens[row].sum() + tokens[rollout] <= BUDGET]
        min(fitting, key=lambda row: (tokens[row] * (tokens[row] + 1)).sum()).append(rollout)
    return rows


def differenced(lengths: SampleLengths, ranks: int) -> Rows:
    """Karmarkar and Karp on counted seconds of encoder and LLM together, over ranks, then over their micro-batches."""
    seconds = _rollout_costs(lengths, MODEL).sum(axis=1)
    of_ranks = divide(seconds, ranks, method="differencing")
    micro_batches = 1
    while True:
        rows: Rows = [[] for _ in range(ranks)]
        for rank, row in enumerate(rows):
            own = np.flatnonzero(of_ranks == rank)
            part_of = divide(seconds[own], micro_batches, method="differencing")
            parts = [own[part_of == part] for part in range(micro_batches)]
            row.extend(sorted(parts, key=lambda part: -seconds[part].sum()))
        if max(lengths.llm_tokens[part].sum() for row in rows for part in row) <= BUDGET:
            return rows
        micro_batches += 1


def ours(lengths: SampleLengths, ranks: int) -> Rows:
    """omnibal.balanced_rows."""
    return balanced_rows(lengths, MODEL, ranks, BUDGET)


METHODS: dict[str, Callable[[SampleLengths, int], Rows]] = {
    "as they came, up to the budget": as_they_came,
    TRL: trls,
    "verl 0.9.1 (karmarkar_karp, 24576·L + L²)": verls,
    KARMARKAR_KARP: differenced,
    OURS: ours,
}


MOST_RANKS = {TRL: 64}
"""TRL's rows are loops of Python over tokens: many minutes at 512 ranks."""


def main(
    measured: Annotated[bool, typer.Option(help="Also train a tiny model on two CPU ranks.")] = True,
) -> None:
    """Divide rollouts by each method, simulate the learner's step, write results.json and print tables."""
    mp.set_start_method("spawn")
    profile = analytic_profile(Model.known(MODEL).records, Device.named(DEVICE))
    versions = machine("torch", "trl", "verl", "numpy")
    found: dict[str, Any] = {
        "made_with": versions,
        "model": MODEL,
        "device": DEVICE,
        "token_budget": BUDGET,
        "rows": [],
    }
    for (ranks, per_rank), draws in DRAWS.items():
        batches = [rollouts(per_rank * ranks, seed) for seed in range(draws)]
        for name, method in METHODS.items():
            if ranks > MOST_RANKS.get(name, ranks):
                continue
            setting = {"ranks": ranks, "rollouts": per_rank * ranks, "method": name}
            found["rows"].append(setting | figures(profile, batches, ranks, method))
            print(ranks, per_rank, name, flush=True)
        RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    if measured:
        found["measured"] = measured_row(
            {name: METHODS[name] for name in METHODS if name not in (OURS, TRL, KARMARKAR_KARP)}
        )
        RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")
    for title, rows in tables_of(found).items():
        print(f"\n## {title}\n\n{rows}")


def figures(
    profile: ModelProfile, batches: list[SampleLengths], ranks: int, method: Callable[[SampleLengths, int], Rows]
) -> dict[str, float]:
    """Means over the batches: seconds of the step where ranks meet, and how much longer it is than with even ranks."""
    seen = []
    for lengths in batches:
        started = time.process_time()
        rows = method(lengths, ranks)
        seconds = time.process_time() - started
        numbers = np.concatenate([part for rank in rows for part in rank]).astype(int)
        assert sorted(numbers) == list(range(len(lengths))), "each rollout once"
        load = load_of(lengths, rows)
        assert load.llm_tokens.max() <= BUDGET
        costs = phase_seconds(profile, load)
        own = sum(costs.values()).sum(axis=2)[0].mean()
        steps = {name: own + waited(costs, name) for name in ("fsdp", "ddp")}
        seen.append(
            {
                "micro_batches": len(rows[0]), "even_seconds": own, "divide_seconds": seconds,
                **{f"{name}_seconds": step for name, step in steps.items()},
                **{f"{name}_over_even": step / own for name, step in steps.items()},
                "tiles_over_even": over_mean(load.vision_units[0]), "tokens_over_even": over_mean(load.llm_tokens[0]),
            }
        )  # fmt: skip
    return {name: float(np.mean([one[name] for one in seen])) for name in seen[0]}


def load_of(lengths: SampleLengths, rows: Rows) -> Load:
    """What micro-batches hold, (1 step, ranks, micro-batches)."""
    tokens = lengths.llm_tokens.astype(float)
    columns = lengths.vision_units.astype(float), tokens, tokens**2
    parts = [[[column[np.array(part, dtype=int)].sum() for part in rank] for rank in rows] for column in columns]
    return Load(*(np.array(part)[None] for part in parts))


def waited(costs: dict[str, Any], layout: Sharding) -> float:
    """Seconds that the mean rank waits in the step."""
    return float(sum(wait(costs, layout).values())[0].mean())


def over_mean(load: np.ndarray) -> float:
    """The rank with most in the whole step, over the mean rank; load is (ranks, micro-batches)."""
    return float(load.sum(axis=1).max() / load.sum(axis=1).mean())


COLUMNS = {
    "FSDP step, s": ("fsdp_seconds", ".2f"), "FSDP over even": ("fsdp_over_even", ".3f"),
    "DDP step, s": ("ddp_seconds", ".2f"), "DDP over even": ("ddp_over_even", ".3f"),
    "tiles": ("tiles_over_even", ".3f"), "tokens": ("tokens_over_even", ".3f"),
    "micro-batches": ("micro_batches", ".1f"),
}  # fmt: skip
MEASURED = {
    "slowest rank, processor s": ("slowest_seconds", ".2f"), "over the mean rank": ("over_mean", ".3f"),
    "gradients off by": ("largest_difference", ".0e"),
}  # fmt: skip


def tables_of(found: dict[str, Any]) -> dict[str, str]:
    """The tables of RESULTS.md, by what they are of."""

    def rendered(rows: list[dict[str, Any]], columns: dict[str, tuple[str, str]]) -> str:
        return table(
            ["method", *columns],
            [[row["method"], *(format(row[name], form) for name, form in columns.values())] for row in rows],
        )

    tables = {
        f"{ranks} ranks, {count:,} rollouts": rendered(
            [row for row in found["rows"] if (row["ranks"], row["rollouts"]) == (ranks, count)], COLUMNS
        )
        for ranks, count in sorted({(row["ranks"], row["rollouts"]) for row in found["rows"]})
    }
    return tables | ({"Two CPU ranks, measured": rendered(found["measured"], MEASURED)} if "measured" in found else {})


if __name__ == "__main__":
    typer.run(main)
