"""What each way to batch, and each further saving, brings transformers.Trainer on one device."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from inspect import signature
from io import StringIO
from threading import Thread
from time import perf_counter
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.modeling_layers import GradientCheckpointingLayer

from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs
from omnibal.data.step_size import fit_step
from omnibal.integrations.trainer.steps import module_of
from omnibal.integrations.transformers import balance
from omnibal.packs.collator import language_of, without_adapters
from omnibal.packs.losses import target_rows
from tools.dropin.ways import Task, by_tokens, default, group_by_length
from tools.gpu.jobs import FULL, Jobs
from tools.gpu.layers import counted_device
from tools.gpu.models import PADDING, TINY, TiledDataset, made_lengths, random_model
from tools.gpu.report import FAILED, Report, Row
from tools.parity.run import padded_batch

GIB, SAMPLES, SAMPLES_SMALL = 2**30, 3800, 240
WARM_UP, LEAST_TIMED, MOST_STEPS = 2, 3, 64
"""Steps that are not timed; those that are timed at least, however long; those after which a way ends."""
GIVEN = {"random": default, "group_by_length": group_by_length, "packed by tokens": by_tokens}
"""Batches that others make; other names are ways of ``balance``."""
PROMISE = re.compile(r"([\d.]+)x the samples a second of random batches(?:.*?([\d.]+)x those of group_by_length)?")
AS_IT_WAS = {"recompute": "as_is", "head": "all"}
"""Arguments of ``balance`` that leave a saving out, as far as it has them."""


@dataclass(frozen=True)
class Setting:
    """A model and how it is trained, whatever its batches."""

    model: str
    checkpointing: bool = True
    lora: bool = False
    batch: int = 4
    accumulation: int = 4

    def __str__(self) -> str:
        """The heading of its table."""
        parts = (self.model, "LoRA, frozen ViT" * self.lora, "gradient checkpointing" * self.checkpointing)
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Way:
    """A way to batch, and what is saved beside it.

    Attributes:
        options: Arguments of ``balance``.
        freed: Shares of the layers of ViT and LLM that do not recompute; None to leave all as they are.
        on_targets: Whether the head works on target rows alone.
        compiles: Whether blocks are compiled one by one.
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()
    freed: tuple[float, float] | None = None
    on_targets: bool = False
    compiles: bool = False


FREED = {"all layers freed": (1.0, 1.0), "ViT and half of the LLM freed": (1.0, 0.5)}
"""What stands for a choice of layers that do not recompute, as long as ``balance`` makes none."""
SETTINGS = (Setting("8B"), Setting("2B", checkpointing=False), Setting("8B", lora=True))
SMALL = (Setting(TINY, checkpointing=False), Setting(TINY, lora=True, batch=2, accumulation=2))
BEHIND = 12  # seconds of a way beside its steps: to make a model, plan packs and start
EXPLAINED = (
    "transformers.Trainer, random weights, pure bf16, fused AdamW. Tokens are real ones; MFU counts 6 (with frozen "
    "weights 4, without a backward pass 2) times parameters and tokens, no recomputation and no attention."
)


def ways(setting: Setting) -> list[Way]:
    """The most telling ones first: some may not come to their turn."""
    takes = signature(balance).parameters
    plain = {name: value for name, value in AS_IT_WAS.items() if name in takes}

    def saving(name: str, by_hand: Iterable[Way]) -> list[Way]:
        """What one saving brings alone: as ``balance`` has it, or by hand where it has it not."""
        own = Way(f"balance, {name}", tuple((other, value) for other, value in plain.items() if other != name))
        return [own] if name in plain else list(by_hand)

    found = [Way("random"), Way("group_by_length"), Way("balance", tuple(plain.items()))]
    if plain:
        found.append(Way("balance, all savings"))
    freed = [Way(f"balance, {name}", freed=shares) for name, shares in FREED.items()]
    if setting.checkpointing:
        found += saving("recompute", freed[:1] if setting.lora else freed)
    if setting.lora:  # time is short
        return found
    found += saving("head", [Way("balance, head on target rows", on_targets=True)])
    return [*found, Way("packed by tokens", tuple(plain.items()))]


def compiled(setting: Setting) -> Way:
    """Blocks compiled one by one, by ``balance`` or by hand."""
    takes = signature(balance).parameters
    plain = tuple((name, value) for name, value in AS_IT_WAS.items() if name in takes)
    if "compile" in takes:
        return Way(f"balance, compiled blocks, {setting}", (*plain, ("compile", True)))
    return Way(f"balance, compiled blocks, {setting}", plain, compiles=True)


def add_ladder(report: Report, *, small: bool) -> None:
    """A table of each setting; compilers, which take long and may fail, behind all of them."""
    settings = SMALL if small else SETTINGS
    # numba's code is compiled beside the first ways, and found by the process of the jobs.
    planned = {"batch_size": 4, "num_replicas": 1}
    Thread(target=fit_step, args=(made_lengths(TINY, 400), 16), kwargs=planned, daemon=True).start()
    tables = {str(setting): [(setting, way) for way in ways(setting)] for setting in settings}
    tables["Compiled blocks"] = [(setting, compiled(setting)) for setting in settings[:2] if not setting.lora]
    jobs, left = Jobs(f"{__name__}:trained"), sum(map(len, tables.values()))

    def rows(turns: list[tuple[Setting, Way]]) -> Iterator[Row]:
        nonlocal left
        for setting, way in turns:
            seconds = max(report.seconds_left / left - BEHIND, 0.0)
            left -= 1
            limit = max(min(3 * (seconds + BEHIND), report.seconds_left), 1)
            yield from _rows(jobs, setting, way, (seconds, small), limit)

    try:
        for title, turns in tables.items():
            report.add(title, EXPLAINED, partial(rows, turns))
    finally:
        jobs.end()


def _rows(jobs: Jobs, setting: Setting, way: Way, options: tuple[float, bool], limit: float) -> Iterator[Row]:
    """The row of one way; if memory does not suffice, a row that says so and that of half the batch."""
    while True:
        names, is_full = {"batches": way.name, "batch": f"{setting.batch} x {setting.accumulation}"}, False
        for row in jobs.rows((setting, way, *options), limit, **names):
            is_full = str(row.get(FAILED, "")).startswith(FULL)
            yield row
        if not is_full or setting.batch == 1:
            return
        setting = replace(setting, batch=setting.batch // 2, accumulation=2 * setting.accumulation)


def trained(job: tuple[Setting, Way, float, bool]) -> Iterator[Row]:
    """The row of one way."""
    setting, way, seconds, small = job
    try:
        yield Run(setting, way, seconds, small=small).row()
    except Exception as error:
        if way.compiles:
            raise RuntimeError(f"after {num_graphs()} graphs: {error}") from error
        raise


class Run:
    """A training of some steps."""

    def __init__(self, setting: Setting, way: Way, seconds: float, *, small: bool) -> None:
        self.setting, self.way, self._seconds = setting, way, seconds
        self.device = torch.device("cpu" if small else "cuda:0")
        self.dataset = TiledDataset.of(setting.model, SAMPLES_SMALL if small else SAMPLES)
        self.promise: Row = {}

    def row(self) -> Row:
        """What the steps that count took."""
        with tempfile.TemporaryDirectory() as folder:
            trainer = self.trainer(folder)
            clock = Clock(trainer, self._seconds, self.device)
            trainer.train()
        found = clock.row() | self._mfu(trainer.model, clock)
        if self.way.compiles:
            found["graphs"] = num_graphs()
        return found | self.promise

    def trainer(self, folder: str) -> Trainer:
        """Ready to train."""
        setting, on_cpu = self.setting, self.device.type == "cpu"
        model = random_model(setting.model, self.device)
        if setting.lora:
            model = with_adapters(model)
        arguments = TrainingArguments(
            folder, max_steps=MOST_STEPS, per_device_train_batch_size=setting.batch,
            gradient_accumulation_steps=setting.accumulation, use_cpu=on_cpu, report_to=[], disable_tqdm=True,
            save_strategy="no", logging_steps=1000, remove_unused_columns=False, learning_rate=1e-6,
            dataloader_num_workers=0 if on_cpu else 4, gradient_checkpointing=setting.checkpointing,
            optim="adamw_torch" if on_cpu else "adamw_torch_fused",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=self.dataset, data_collator=padded_batch)
        self._batch(trainer)
        blocks = blocks_of(model)
        if self.way.freed is not None:
            trainer.add_callback(Frees(blocks, self.way.freed))
        if self.way.on_targets:
            target_rows(model)
        if self.way.compiles:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            torch._dynamo.config.fail_on_recompile_limit_hit = True
            for block in (block for of_part in blocks for block in of_part):
                block.compile(dynamic=True, backend="eager" if on_cpu else "inductor")
        return trainer

    def _batch(self, trainer: Trainer) -> None:
        """Let the trainer have the way's batches."""
        name, lengths = self.way.name, self.dataset.lengths
        given, options = GIVEN.get(name), {"lengths": lengths, "check_lengths": False, **dict(self.way.options)}
        task = Task(lengths, 1, self.setting.accumulation, self.setting.batch)
        steps = [] if given is None else [step[0] for step in given(task).steps]
        steps = [steps[number] for number in spread(len(steps))]
        if given is not None and name != "packed by tokens":
            order = [sample for step in steps for batch in step for sample in batch]
            vars(trainer)["_get_train_sampler"] = lambda *arguments, **others: order
            return
        if given is None:
            self.promise = promised(lambda: balance(trainer, **options))
            return
        # The loss and attention of ``balance``, with packs of another's.
        packs = [batch for step in steps for batch in step]
        most = max(int(lengths.llm_tokens[pack].sum()) for pack in packs)
        sampler = balance(trainer, PackLimits(int(lengths.vision_units.sum()), most), **options)
        numbers = np.arange(sampler.micro_batches)
        sampler.packs_of_step = lambda step: Packs.from_lists(
            packs[number % len(packs)] for number in step * len(numbers) + numbers
        )

    def _mfu(self, model: Any, clock: Clock) -> Row:
        """Model FLOPs utilization: of weights that are trained 6 times parameters times tokens."""
        config = without_adapters(model).config
        patches = (config.vision_config.image_size[0] // config.vision_config.patch_size[0]) ** 2 + 1
        sizes = {"vision": 0, "language": 0}
        embedding = without_adapters(model).get_input_embeddings().weight
        for name, weight in model.named_parameters():
            part = module_of(name)
            # A head that is tied to the embedding multiplies; an embedding that is not only looks up.
            if part in sizes and "lora_" not in name and (weight is not embedding or config.tie_word_embeddings):
                sizes[part] += weight.numel()
        vision, language = (2, 4) if self.setting.lora else (6, 6)
        work = vision * sizes["vision"] * patches * clock.tiles_a_second
        work += language * sizes["language"] * clock.tokens_a_second
        name = "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name()
        return {"MFU": work / float(counted_device(name).flops_per_second or 0)}


def num_graphs() -> int:
    """Graphs that dynamo has compiled since it was reset."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def with_adapters(model: Any) -> Any:
    """LoRA on the LLM; the ViT is frozen."""
    names = "|".join(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    return get_peft_model(model, LoraConfig(r=16, target_modules=rf".*language_model.*\.({names})"))


def blocks_of(model: Any) -> tuple[list[Any], list[Any]]:
    """Blocks of the ViT and of the LLM, each of which may recompute."""
    language = {id(module) for module in language_of(model).modules()}
    blocks = [module for module in without_adapters(model).modules() if hasattr(module, "gradient_checkpointing")]
    blocks = [block for block in blocks if isinstance(block, GradientCheckpointingLayer)]
    return [b for b in blocks if id(b) not in language], [b for b in blocks if id(b) in language]


def spread(count: int) -> list[int]:
    """All numbers below a count, so that the first of them, however many, are spread evenly.

    >>> spread(5)
    [0, 4, 2, 1, 3]
    """
    bits = max(count - 1, 0).bit_length()
    order = [int(f"{number:0{bits}b}"[::-1], 2) if bits else 0 for number in range(2**bits)]
    return [number for number in order if number < count]


def promised(act: Callable[[], Any]) -> Row:
    """What the line that ``balance`` prints promises."""
    said = StringIO()
    with redirect_stdout(said):
        act()
    print(said.getvalue(), flush=True)
    found = PROMISE.search(said.getvalue())
    names = ("promised times random", "promised times grouped")
    gains = {} if found is None else {
        name: float(gain) for name, gain in zip(names, found.groups(), strict=True) if gain
    }  # fmt: skip
    limits = re.search(r"of at most (\d+ [\w ]+ and \d+ tokens)", said.getvalue())
    return gains | ({} if limits is None else {"a pack holds": limits[1]})


class Frees(TrainerCallback):  # type: ignore[misc]
    """Lets a share of the layers keep their activations, once Trainer has let all of them recompute."""

    def __init__(self, blocks: tuple[list[Any], ...], shares: tuple[float, ...]) -> None:
        self._blocks, self._shares = blocks, shares

    def on_train_begin(self, *arguments: Any, **others: Any) -> None:
        """Spread them over the model."""
        for blocks, share in zip(self._blocks, self._shares, strict=True):
            for number, block in enumerate(blocks):
                block.gradient_checkpointing = int((number + 1) * share) == int(number * share)


class Clock(TrainerCallback):  # type: ignore[misc]
    """Times a trainer's steps, counts what they hold, and ends the training when its time is up."""

    def __init__(self, trainer: Trainer, seconds: float, device: torch.device) -> None:
        self._seconds, self._device = seconds, device
        # Seconds, tokens, tokens with padding, samples, tiles, seconds of loading; behind each step.
        self.marks: list[np.ndarray] = []
        self._held: list[Any] = [0] * 5
        self._batches_of = trainer.get_batch_samples
        vars(trainer)["get_batch_samples"] = self._load
        trainer.add_callback(self)
        trainer.model.register_forward_pre_hook(self._count, with_kwargs=True)
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _load(self, *arguments: Any) -> Any:
        begin = perf_counter()  # the device has done its last step
        found = self._batches_of(*arguments)
        self._held[4] += perf_counter() - begin
        return found

    def _count(self, model: Any, arguments: Any, given: dict[str, Any]) -> None:
        if not model.training:
            return
        ids, positions, pixels = (given.get(name) for name in ("input_ids", "position_ids", "pixel_values"))
        samples = len(ids) if positions is None else (positions == 0).sum()
        held = (ids != PADDING).sum(), ids.numel(), samples, 0 if pixels is None else len(pixels)
        self._held[:4] = [before + now for before, now in zip(self._held, held, strict=False)]

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Wait for the device, and look at the clock."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self.marks.append(np.array([perf_counter(), *map(float, self._held)]))
        timed = len(self.marks) - WARM_UP
        if timed >= LEAST_TIMED and self.marks[-1][0] - self.marks[WARM_UP - 1][0] > self._seconds:
            control.should_training_stop = True

    @property
    def _whole(self) -> np.ndarray:
        return self.marks[-1] - self.marks[WARM_UP - 1]

    @property
    def tokens_a_second(self) -> float:
        """Real tokens."""
        return float(self._whole[1] / self._whole[0])

    @property
    def tiles_a_second(self) -> float:
        """Tiles of images."""
        return float(self._whole[4] / self._whole[0])

    def row(self) -> dict[str, Any]:
        """Of the steps that count."""
        seconds, tokens, rows, samples, _, loading = self._whole.tolist()
        each = np.diff(self.marks[WARM_UP - 1 :], axis=0)
        rates = each[:, 1] / each[:, 0]
        error = rates.std(ddof=1) / len(rates) ** 0.5 / rates.mean() if len(rates) > 1 else 0.0
        peak = torch.cuda.max_memory_allocated() if self._device.type == "cuda" else 0
        return {
            "steps": len(rates), "step s": seconds / len(rates), "tokens/s": tokens / seconds,
            "+- %": 100 * float(error), "samples/s": samples / seconds, "peak GiB": peak / GIB,
            "real tokens": tokens / rows, "waiting for data": loading / seconds,
        }  # fmt: skip
