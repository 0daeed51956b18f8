"""Other packages' samplers on given lengths. Runs in the peers' environment, which knows nothing of omnibal.

    python peers.py task.npz folder [name …]

reads ``llm_tokens``, ``vision_units``, ``num_replicas``, ``batch_size``, ``most_tokens`` and ``seed``, and writes for
each peer (of the names, or all) a file with ``samples`` and ``starts`` (its micro-batches in running order: step after
step, rank after rank) and ``seconds``: those of the package's own work for one rank, on one process; what is compiled
is compiled before. Files of lmms-engine also have ``encoded``: the vision units of each micro-batch where its
``lpt_balance`` has sent images to other ranks.
"""

import importlib.util
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import ModuleType, TracebackType

import binpacking
import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard
from axolotl.utils.samplers.multipack import MultipackBatchSampler
from datasets import Dataset, disable_progress_bars
from lmms_engine.parallel.vit_parallel.balance import lpt_balance
from nemo_automodel.components.datasets.vlm.neat_packing_vlm import greedy_knapsack_vt_balanced
from torch.utils.data import BatchSampler, DistributedSampler, RandomSampler, Sampler
from transformers.trainer_pt_utils import BatchRebalanceSampler, LengthGroupedSampler
from trl.data_utils import pack_dataset
from verl.utils.seqlen_balancing import calculate_workload, get_seqlen_balanced_partitions

MicroBatches = list[Sequence[int]]

MS_SWIFT_CHUNK = 1000
"""ms-swift packs samples in the order of the dataset, so many at a time; the last pack waits for the next ones."""
AXOLOTL_GROUP, AXOLOTL_BIN = 100_000, 200
"""axolotl's default sample_packing_group_size and sample_packing_bin_size."""


class Stopwatch:
    """Counts the seconds spent in its context."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.seconds += time.perf_counter() - self._started


@dataclass(frozen=True)
class Task:
    """What is to be packed, and for whom; ``watch`` runs while a package works."""

    llm_tokens: list[int]
    vision_units: list[int]
    num_replicas: int
    batch_size: int
    most_tokens: int
    seed: int
    watch: Stopwatch = field(default_factory=Stopwatch)

    def generator(self) -> torch.Generator:
        """A generator in its first state."""
        return torch.Generator().manual_seed(self.seed)

    def anew(self, count: int | None = None) -> "Task":
        """The same, or its first samples, with a stopwatch at zero."""
        first = self.llm_tokens[:count], self.vision_units[:count]
        return replace(self, llm_tokens=first[0], vision_units=first[1], watch=Stopwatch())


def transformers_random(task: Task) -> MicroBatches:
    """Trainer's default."""
    return _sharded(RandomSampler(task.llm_tokens, generator=task.generator()), task)


def transformers_group_by_length(task: Task) -> MicroBatches:
    """Trainer with train_sampling_strategy="group_by_length"."""
    return _sharded(LengthGroupedSampler(task.batch_size, lengths=task.llm_tokens, generator=task.generator()), task)


def transformers_batch_rebalance(task: Task) -> MicroBatches:
    """Trainer with train_sampling_strategy="batch_rebalance"; every rank plans all steps and takes its part."""
    ranks = []
    for rank in range(task.num_replicas):
        watch = task.watch if rank == 0 else Stopwatch()
        with watch:
            sampler = BatchRebalanceSampler(
                task.llm_tokens,
                effective_batch_size=task.batch_size * task.num_replicas,
                dp_size=task.num_replicas,
                grad_accum=1,
                rank=rank,
                drop_last=False,
                seed=task.seed,
            )
            ranks.append(list(sampler))
    return _interleaved(ranks)


def trl_best_fit(task: Task) -> MicroBatches:
    """SFTTrainer with packing=True: best fit decreasing by tokens among 1000 samples, one pack a micro-batch."""
    tokens = np.array(task.llm_tokens)
    samples = np.repeat(np.arange(len(tokens), dtype=np.int32), tokens)
    lists = np.split(samples, np.cumsum(tokens)[:-1])
    dataset = Dataset.from_dict({"input_ids": lists})
    with task.watch:
        packed = pack_dataset(dataset, task.most_tokens, "bfd")
    rows = packed.with_format("numpy")
    packs = [row["input_ids"][np.cumsum([0, *row["seq_lengths"][:-1]])].tolist() for row in rows]
    return _shuffled(packs, task)


def axolotl_multipack(task: Task) -> MicroBatches:
    """sample_packing: first fit by tokens, one pack a micro-batch."""
    sampler = MultipackBatchSampler(
        RandomSampler(task.llm_tokens, generator=task.generator()),
        batch_size=1,
        batch_max_len=task.most_tokens,
        lengths=np.array(task.llm_tokens),
        bin_size=AXOLOTL_BIN,
        group_size=AXOLOTL_GROUP,
        drop_last=True,
        num_processes=1,
    )
    with task.watch:
        len(sampler)  # asked by the trainer; packs several times to find the least number
        list(sampler)
    ranks = [list(BatchSamplerShard(sampler, task.num_replicas, rank)) for rank in _ranks(task)]
    return _interleaved([[bins[0] for bins in rank] for rank in ranks])


def binpacking_constant_volume(task: Task) -> MicroBatches:
    """binpacking.to_constant_volume by tokens, used as ms-swift does with packing."""
    items = list(enumerate(task.llm_tokens))
    packs, waiting = [], []
    for start in range(0, len(items), MS_SWIFT_CHUNK):
        chunk = waiting + items[start : start + MS_SWIFT_CHUNK]
        with task.watch:
            found = binpacking.to_constant_volume(chunk, task.most_tokens, weight_pos=1)
        waiting = found.pop() if start + MS_SWIFT_CHUNK < len(items) else []
        packs += [[sample for sample, _ in pack] for pack in found]
    return _shuffled(packs, task)


def verl_karmarkar_karp(task: Task) -> MicroBatches:
    """balance_batch: the samples of a random step over the ranks, equally many each, by Karmarkar and Karp."""
    order = torch.randperm(len(task.llm_tokens), generator=task.generator()).tolist()
    step_samples = task.batch_size * task.num_replicas
    packs = []
    for start in range(0, len(order) - step_samples + 1, step_samples):
        step = order[start : start + step_samples]
        tokens = torch.tensor([task.llm_tokens[sample] for sample in step])
        with task.watch:
            workload = calculate_workload(tokens).tolist()
            parts = get_seqlen_balanced_partitions(workload, k_partitions=task.num_replicas, equal_size=True)
        packs += [[step[place] for place in part] for part in parts]
    return packs


def automodel_vt_balanced(task: Task) -> MicroBatches:
    """NeMo Automodel: a knapsack by tokens, then packs in the order of their vision, dealt one after another."""
    return _dealt(_automodel(task), task, shuffle=False)


def automodel_shuffled(task: Task) -> MicroBatches:
    """The same packs, dealt in random order."""
    return _dealt(_automodel(task), task, shuffle=True)


def lmms_first_fit(task: Task) -> MicroBatches:
    """lmms-engine's FirstFitPacking on each rank's part of the shuffled stream."""
    return _lmms("FirstFitPacking", task)


def lmms_best_fit(task: Task) -> MicroBatches:
    """lmms-engine's BestFitPacking on each rank's part of the shuffled stream."""
    return _lmms("BestFitPacking", task)


def lmms_balanced(task: Task) -> MicroBatches:
    """lmms-engine's BalancedPacking on each rank's part of the shuffled stream."""
    return _lmms("BalancedPacking", task)


PEERS: dict[str, Callable[[Task], MicroBatches]] = {
    peer.__name__: peer
    for peer in (
        transformers_random,
        transformers_group_by_length,
        transformers_batch_rebalance,
        trl_best_fit,
        axolotl_multipack,
        binpacking_constant_volume,
        verl_karmarkar_karp,
        automodel_vt_balanced,
        automodel_shuffled,
        lmms_first_fit,
        lmms_best_fit,
        lmms_balanced,
    )
}


def _sharded(sampler: Sampler[int], task: Task) -> MicroBatches:
    """Batches of consecutive samples, dealt to the ranks as Trainer has accelerate do it."""
    batches = BatchSampler(sampler, task.batch_size, drop_last=False)
    with task.watch:
        order = list(batches)  # one order for all ranks, as their common seed has it
    return _interleaved(
        [list(BatchSamplerShard(_Listed(order, task.batch_size), task.num_replicas, rank)) for rank in _ranks(task)]
    )


def _shuffled(packs: MicroBatches, task: Task) -> MicroBatches:
    """One row of a packed dataset a micro-batch, in random order."""
    order = torch.randperm(len(packs), generator=task.generator()).tolist()
    rows = _Listed([[row] for row in order], 1)
    ranks = [list(BatchSamplerShard(rows, task.num_replicas, rank)) for rank in _ranks(task)]
    return [packs[row] for (row,) in _interleaved(ranks)]


def _automodel(task: Task) -> MicroBatches:
    with task.watch:
        return greedy_knapsack_vt_balanced(task.llm_tokens, task.most_tokens, task.vision_units)


def _dealt(packs: MicroBatches, task: Task, *, shuffle: bool) -> MicroBatches:
    """Packs dealt to ranks by torch's own sampler, which repeats some where they do not fill the last step."""
    options = {"num_replicas": task.num_replicas, "shuffle": shuffle, "seed": task.seed}
    ranks = [[packs[n] for n in DistributedSampler(packs, rank=rank, **options)] for rank in _ranks(task)]
    return _interleaved(ranks)


def _lmms(name: str, task: Task) -> MicroBatches:
    order = torch.randperm(len(task.llm_tokens), generator=task.generator()).tolist()
    ranks = []
    for rank in _ranks(task):
        packer, packs = getattr(_lmms_packing(), name)(task.most_tokens), []
        with task.watch if rank == 0 else Stopwatch():
            for sample in order[rank :: task.num_replicas]:
                if task.llm_tokens[sample] <= task.most_tokens:  # the caller leaves longer ones out
                    packs += packer.add(sample, task.llm_tokens[sample])
            packs += packer.flush()
        ranks.append(packs)
    return _interleaved(ranks)


@cache
def _lmms_packing() -> ModuleType:
    """lmms-engine's packing alone: the folder above it imports readers of audio and video."""
    package = importlib.util.find_spec("lmms_engine")
    folder = Path(package.origin).parent / "datasets" / "packing"
    spec = importlib.util.spec_from_file_location(
        "lmms_packing", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    module = sys.modules["lmms_packing"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def encoded_by_lpt(packs: MicroBatches, task: Task) -> list[int]:
    """Vision units of each micro-batch's rank where lpt_balance moves images, one a sample, between a step's ranks."""
    units: list[int] = []
    for start in range(0, len(packs), task.num_replicas):
        step = packs[start : start + task.num_replicas]
        loads = [task.vision_units[sample] for pack in step for sample in pack]
        units += lpt_balance(loads, task.num_replicas, frames_per_rank=[len(pack) for pack in step])[1]
    return units


class _Listed(BatchSampler):
    """Batches that are known."""

    def __init__(self, batches: MicroBatches, batch_size: int) -> None:
        self.batches, self.batch_size, self.drop_last = batches, batch_size, False

    def __iter__(self) -> Iterable[Sequence[int]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


def _ranks(task: Task) -> range:
    return range(task.num_replicas)


def _interleaved(ranks: Sequence[MicroBatches]) -> MicroBatches:
    """Running order from each rank's micro-batches; those that not all ranks have are not run."""
    return [batch for step in zip(*ranks, strict=False) for batch in step]


def main(source: Path, folder: Path, names: Sequence[str]) -> None:
    """Run peers on a task."""
    disable_progress_bars()
    given = np.load(source)
    task = Task(
        given["llm_tokens"].tolist(),
        given["vision_units"].tolist(),
        *(int(given[name]) for name in ("num_replicas", "batch_size", "most_tokens", "seed")),
    )
    for name in names or PEERS:
        peer = PEERS[name]
        peer(task.anew(4 * task.batch_size * task.num_replicas))
        timed = task.anew()
        packs = peer(timed)
        print(f"{name}: {len(packs)} micro-batches in {timed.watch.seconds:.2f} s", flush=True)
        samples = np.concatenate([np.array(pack, dtype=np.int64) for pack in packs])
        starts = np.cumsum([0, *map(len, packs)])
        more = {"encoded": encoded_by_lpt(packs, timed)} if name.startswith("lmms") else {}
        np.savez(folder / f"{name}.npz", samples=samples, starts=starts, seconds=timed.watch.seconds, **more)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
