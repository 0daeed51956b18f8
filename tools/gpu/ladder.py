"""What each way to batch, and each further saving, brings transformers.Trainer on one device."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import partial
from io import StringIO
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

from omnibal.data.limits import PackLimits
from omnibal.data.packs import Packs
from omnibal.data.step_size import fit_step
from omnibal.integrations.trainer import compare
from omnibal.integrations.trainer.clock import MeasuredWay
from omnibal.integrations.trainer.compare import GROUPED, PLAIN, measure, spread
from omnibal.integrations.trainer.memory import FULL
from omnibal.integrations.trainer.steps import module_of
from omnibal.integrations.transformers import balance
from omnibal.packs.collator import without_adapters
from omnibal.packs.loading import PackSampler
from tools.dropin.ways import Task, by_tokens
from tools.gpu.jobs import Jobs
from tools.gpu.layers import counted_device
from tools.gpu.models import TINY, TiledDataset, made_lengths, random_model
from tools.gpu.report import FAILED, Report, Row
from tools.parity.run import padded_batch

SAMPLES, SAMPLES_SMALL = 3800, 240
STEPS = 62  # that are timed at most
PROMISE = re.compile(r"([\d.]+)x the samples a second of random batches(?:.*?([\d.]+)x those of group_by_length)?")
AS_IT_WAS = tuple(PLAIN.items())


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
    """

    name: str
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def compiles(self) -> bool:
        """Whether blocks are compiled one by one."""
        return bool(dict(self.options).get("compile"))


SETTINGS = (Setting("8B"), Setting("2B", checkpointing=False), Setting("8B", lora=True))
SMALL = (Setting(TINY, checkpointing=False), Setting(TINY, lora=True, batch=2, accumulation=2))
BEHIND = 12  # seconds of a way beside its steps: to make a model, plan packs and start
EXPLAINED = (
    "transformers.Trainer, random weights, pure bf16, fused AdamW. Tokens are real ones; MFU counts 6 (with frozen "
    "weights 4, without a backward pass 2) times parameters and tokens, no recomputation and no attention."
)


def ways(setting: Setting) -> list[Way]:
    """The most telling ones first: some may not come to their turn."""

    def saving(name: str) -> Way:
        """What one saving brings alone."""
        return Way(f"balance, {name}", tuple((other, value) for other, value in AS_IT_WAS if other != name))

    found = [Way("random"), Way("group_by_length"), Way("balance", AS_IT_WAS), Way("balance, all savings")]
    if setting.checkpointing:
        found.append(saving("recompute"))
    if setting.lora:  # time is short
        return found
    return [*found, saving("head"), Way("packed by tokens", AS_IT_WAS)]


def compiled(setting: Setting) -> Way:
    """Blocks compiled one by one."""
    return Way(f"balance, compiled blocks, {setting}", (*AS_IT_WAS, ("compile", True)))


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

    def row(self) -> Row:
        """What the steps that count took."""
        said = StringIO()
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(said):
            trainer = self.trainer(folder)
            lengths, name = self.dataset.lengths, self.way.name
            found = measure(
                trainer, name, self.batches, STEPS, Path(folder),
                balance=balance, lengths=lengths, seconds=self._seconds,
            )  # fmt: skip
        print(said.getvalue(), flush=True)
        if found.failed is not None and not found.failed.startswith(FULL):
            raise RuntimeError(found.failed)
        row = row_of(found) | ({} if found.failed else self._mfu(trainer.model, found))
        if self.way.compiles:
            row["graphs"] = num_graphs()
        return row | promised(said.getvalue())

    def trainer(self, folder: str) -> Trainer:
        """As a user has it, with what is saved by hand."""
        setting, on_cpu = self.setting, self.device.type == "cpu"
        model = random_model(setting.model, self.device)
        if setting.lora:
            model = with_adapters(model)
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=setting.batch,
            gradient_accumulation_steps=setting.accumulation, use_cpu=on_cpu, report_to=[], disable_tqdm=True,
            remove_unused_columns=False, learning_rate=1e-6,
            dataloader_num_workers=0 if on_cpu else 4, gradient_checkpointing=setting.checkpointing,
            optim="adamw_torch" if on_cpu else "adamw_torch_fused",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=self.dataset, data_collator=padded_batch)
        if self.way.compiles:
            torch._dynamo.reset()
            torch._dynamo.utils.counters.clear()
            torch._dynamo.config.fail_on_recompile_limit_hit = True
        return trainer

    @property
    def batches(self) -> compare.Way:
        """The way as ``compare`` takes it."""
        given: dict[str, compare.Way] = {"random": None, GROUPED: GROUPED, "packed by tokens": self._by_tokens}
        return given.get(self.way.name, self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {"lengths": self.dataset.lengths, "check_lengths": False, **dict(self.way.options)}

    def _by_tokens(self, trainer: Trainer) -> PackSampler:
        """The loss and attention of ``balance``, with packs of another's."""
        lengths, setting = self.dataset.lengths, self.setting
        steps = [step[0] for step in by_tokens(Task(lengths, 1, setting.accumulation, setting.batch)).steps]
        packs = [batch for number in spread(len(steps)) for batch in steps[number]]
        most = max(int(lengths.llm_tokens[pack].sum()) for pack in packs)
        sampler = balance(trainer, PackLimits(int(lengths.vision_units.sum()), most), **self._options)
        numbers = np.arange(sampler.micro_batches)
        vars(sampler)["packs_of_step"] = lambda step: Packs.from_lists(
            packs[number % len(packs)] for number in step * len(numbers) + numbers
        )
        return sampler

    def _mfu(self, model: Any, found: MeasuredWay) -> Row:
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
        work = vision * sizes["vision"] * patches * found.vision_units / found.seconds
        work += language * sizes["language"] * found.tokens_per_second
        name = "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name()
        return {"MFU": work / float(counted_device(name).flops_per_second or 0)}


def num_graphs() -> int:
    """Graphs that dynamo has compiled since it was reset."""
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def with_adapters(model: Any) -> Any:
    """LoRA on the LLM; the ViT is frozen."""
    names = "|".join(("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))
    return get_peft_model(model, LoraConfig(r=16, target_modules=rf".*language_model.*\.({names})"))


def promised(said: str) -> Row:
    """What the line that ``balance`` prints promises."""
    found, limits = PROMISE.search(said), re.search(r"of at most (\d+ [\w ]+ and \d+ tokens)", said)
    names = ("promised times random", "promised times grouped")
    gains = {} if found is None else {
        name: float(gain) for name, gain in zip(names, found.groups(), strict=True) if gain
    }  # fmt: skip
    return gains | ({} if limits is None else {"a pack holds": limits[1]})


def row_of(found: MeasuredWay) -> dict[str, Any]:
    """Of the steps that count."""
    if found.failed is not None:
        return {FAILED: found.failed}
    return {
        "steps": found.steps, "step s": found.seconds / found.steps, "tokens/s": found.tokens_per_second,
        "+- %": 100 * found.error, "samples/s": found.samples_per_second, "peak GiB": found.peak_gib or 0.0,
        "real tokens": found.real_tokens, "waiting for data": found.loading_seconds * found.steps / found.seconds,
    }  # fmt: skip
