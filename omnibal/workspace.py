"""What a ds_config and its ``run.output`` hold: data, profile, cluster, plan; found, or made and kept when asked for.

The commands, ``omnibal.train`` and ``omnibal.initialize`` read a ds_config through a `Workspace`, so that all of them
open the same data, lay the model out alike and follow the same plan.
"""

import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal

from omnibal.cluster import Cluster, Layout
from omnibal.config import dtype_of, layout_of, micro_batches_of, read_config, resolve_plan
from omnibal.config.section import OmnibalSection, RunFiles
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, choose_limits
from omnibal.data.packing_spec import Mixture
from omnibal.data.source_draws import typical_lengths
from omnibal.device import Device
from omnibal.errors import ConfigError, DataError
from omnibal.families.base import LayerRecord
from omnibal.families.parts import check_degree
from omnibal.pipeline.schedule import check_units
from omnibal.plan import Plan
from omnibal.planner.packings import num_replicas_on
from omnibal.profile.calibration import Calibration
from omnibal.profile.counted import analytic_profile, with_sums
from omnibal.profile.records import ModelProfile

if TYPE_CHECKING:
    from omnibal.formats.conversations import ConversationDataset, ConversationStream
    from omnibal.formats.rows import Problem
    from omnibal.vlm import VisionLanguageModel

LOG: Final = logging.getLogger(__name__)
Say = Callable[[str], object]
# Shows what takes long while it does; what it yields is called with what is being done by then.
Working = Callable[[str], AbstractContextManager[Say]]


@contextmanager
def _unseen(doing: str) -> Iterator[Say]:
    LOG.debug(doing)
    yield LOG.debug


@dataclass(frozen=True)
class FoundLengths:
    lengths: SampleLengths
    origin: str  # name of the folder or file that the lengths come from, for messages
    problems: tuple["Problem", ...] = ()  # items that were left out
    repeat_time: Mixture | None = None  # what a meta file's repetitions make, where each item was measured once

    def __post_init__(self) -> None:
        if not len(self.lengths):
            raise DataError(f"lengths must hold at least one sample, got none in {self.origin}")


@dataclass(frozen=True)
class Overrides:
    """What a command line names in place of what the ds_config says and its folder holds."""

    lengths: FoundLengths | None = None
    profile: ModelProfile | None = None
    cluster: Cluster | None = None
    plan: Plan | None = None


@dataclass(eq=False)
class Workspace:
    """A ds_config, with what its ``run.output`` holds; or files of someone who has no ds_config.

    What the command line names comes first, then what the ds_config says, then what is kept and still fits.
    """

    config: dict[str, Any]  # without its "omnibal" section
    section: OmnibalSection
    files: RunFiles | None = None  # where things are kept; None without a ds_config
    source: object = "the ds_config"  # its name in messages
    overrides: Overrides = Overrides()
    makes: bool = False  # whether a plan that is missing may be made: commands make one, training refuses to begin
    measures: bool = False  # whether layers are measured on this machine, not counted
    replaces: bool = False  # whether the plan that training follows, and its profile, may be replaced
    say: Say = LOG.info
    working: Working = _unseen
    warnings: list[str] = field(default_factory=list)  # of measurements whose costs are doubtful

    @classmethod
    def read(cls, config: str | Path | dict[str, Any], **options: Any) -> "Workspace":
        deepspeed_config, section = read_config(config)
        return cls(deepspeed_config, section, section.run.files, **options)

    @property
    def kept(self) -> RunFiles:
        """Where a profile is kept: beside the plan that training follows unless it may be replaced."""
        assert self.files is not None, "only a ds_config keeps something"
        return self.files if self.replaces or self.followed_plan is None else self.files.what_if

    @property
    def kept_plan(self) -> Path:
        """Where a plan is kept: where training finds it only if it may be replaced."""
        assert self.files is not None, "only a ds_config keeps something"
        return self.files.plan if self.replaces else self.files.what_if.plan

    @property
    def followed_plan(self) -> Path | None:
        """The plan's file that the ds_config names, be it there or not; else the one in ``run.output``, if any."""
        named = self.section.pipeline.plan
        if named is not None:
            return Path(named)
        return self.files.plan if self.files is not None and self.files.plan.is_file() else None

    @cached_property
    def named_plan(self) -> Plan | None:
        # Read once: layout, plan and messages of a run must be of one and the same file.
        path = self.followed_plan
        if self.overrides.plan is not None or path is None:
            return self.overrides.plan
        if self.files is not None and path == self.files.plan and not path.exists():
            if not self.makes:
                raise ConfigError(f"omnibal.pipeline.plan must be a file, got {path}; `omnibal plan --write` makes it")
            self.say(f"{path} is not there: the ds_config's other keys count until `omnibal plan --write` makes it")
            return None
        return Plan.load(path)

    @property
    def micro_batches(self) -> int:
        return micro_batches_of(self.config, self.named_plan)

    @property
    def run_config(self) -> dict[str, Any]:
        """The ds_config as DeepSpeed reads it: a plan takes the place of its batch sizes."""
        batch = {} if self.named_plan is None else {"train_batch_size": "auto"}
        return self.config | batch | {"gradient_accumulation_steps": self.micro_batches}

    @property
    def replaced_batch(self) -> str:
        """The ds_config's batch sizes that the plan takes the place of, in words; empty if there are none."""
        if self.config.get("gradient_accumulation_steps") == self.micro_batches or self.named_plan is None:
            return ""
        sizes = {key: self.config.get(key) for key in ("gradient_accumulation_steps", "train_batch_size")}
        return ", ".join(f"{key} {size}" for key, size in sizes.items() if isinstance(size, int))

    @property
    def model_folder(self) -> Path:
        if self.section.model.path is None:
            raise ConfigError(f"omnibal.model.path must name the model's folder, got none in {self.source}")
        return Path(self.section.model.path)

    @cached_property
    def model(self) -> "VisionLanguageModel":
        from omnibal.vlm import load_model

        return load_model(self.model_folder, self.section.model.lora, self.section.model.frozen)

    @cached_property
    def records(self) -> tuple[LayerRecord, ...]:
        """The model's layers; of any family that can be planned."""
        from omnibal.vlm import load_records

        return load_records(self.model_folder, self.section.model.lora, self.section.model.frozen)

    def dataset(
        self, part: Literal["train", "held_out"], cache: Path | None = None, *, measured: bool = False
    ) -> "ConversationDataset":
        """The section's ``data.train`` or ``data.held_out``; once another process has ``measured`` it, only read.

        ``cache`` is the folder of what is measured, by default the one in ``run.output``.
        """
        from omnibal.formats.conversations import open_dataset

        data = self.section.data
        return open_dataset(
            **self._data(part),
            decode=data.decode,
            measured=measured,
            cache=self.section.run.files.lengths if cache is None else cache,
            each_once=part == "train" and data.mixture is not None,
        )

    def streams(self, workers: int) -> "dict[str, ConversationStream]":
        from omnibal.formats.conversations import open_streams

        return open_streams(**self._data("train"), workers=workers)

    def _data(self, part: str) -> dict[str, Any]:
        data = self.section.data
        path: str | None = getattr(data, part)
        if path is None:
            raise ConfigError(
                f"dataset must be given, got none; pass it to initialize or set omnibal.data.{part} in {self.source}"
            )
        return {
            "paths": path,
            "model_folder": self.model_folder,
            "image_folder": data.images,
            "max_tiles": data.max_tiles,
            "max_image_pixels": data.max_image_pixels,
            "broken": data.broken,
        }

    def measured_lengths(self, cache: Path) -> FoundLengths:
        dataset = self.dataset("train", cache)
        return FoundLengths(dataset.lengths(), str(self.section.data.train), dataset.skipped, dataset.repeat_time())

    @property
    def has_lengths(self) -> bool:
        return bool(self.overrides.lengths or self.section.data.train)

    @cached_property
    def found_lengths(self) -> FoundLengths:
        """Lengths of every sample; measured and kept unless the command line names them."""
        if self.overrides.lengths is not None:
            return self.overrides.lengths
        if not self.section.data.train:
            key = "" if self.files is None else f"set omnibal.data.train in {self.source}, or "
            raise ConfigError(f"lengths must be known here, got none; {key}name a folder of lengths with --lengths")
        # Beside what the dataset caches, the folder holds the lengths themselves: SampleLengths.load opens it.
        folder, before = self.section.run.files.lengths, None
        found = self.measured_lengths(folder)
        with suppress(DataError):
            before = SampleLengths.load(folder).content_hash
        if before != found.lengths.content_hash:
            found.lengths.save(folder)
        return found

    @cached_property
    def lengths(self) -> SampleLengths:
        """Lengths of samples; under a mixture, of samples as it draws them."""
        found, mixture = self.found_lengths, self.section.data.mixture
        return typical_lengths(found.lengths, found.repeat_time if mixture == "repeat_time" else mixture)

    @property
    def limits(self) -> PackLimits:
        return choose_limits(self.lengths, self.section.packing.vision_units, self.section.packing.llm_tokens)

    @property
    def asked_cluster(self) -> Cluster | None:
        return self.overrides.cluster or self.section.cluster

    @property
    def known_cluster(self) -> Cluster | None:
        """The machines of the command line, the ds_config or a named plan, or this machine's CUDA devices, if any."""
        return self.asked_cluster or (self.overrides.plan and self.overrides.plan.cluster) or devices_at_hand()

    @cached_property
    def cluster(self) -> Cluster:
        found = self.known_cluster
        if found is None:
            key = "" if self.files is None else f'set "omnibal": {{"cluster": …}} in {self.source}, or '
            raise ConfigError(
                f"cluster must be known here, got none and no CUDA device; {key}say --cluster 4x8xA100-80GB"
            )
        return found

    def layout_on(self, num_devices: int, devices: str, num_layers: int, num_tensor: int | None = None) -> Layout:
        """How the run lies on some devices: stages as asked for, of the plan, or as many as there are devices."""
        pipeline, named = self.section.pipeline, self.named_plan
        num_tensor, encoder = num_tensor or self.num_tensor, pipeline.encoder_on(num_devices, named)
        stages = pipeline.stages_on(num_devices, num_tensor, encoder, named)
        replicas = num_replicas_on(
            num_devices, stages, num_layers=num_layers, num_tensor=num_tensor, devices=devices, encoder=encoder
        )
        layout = replace(layout_of(self.config, stages, replicas), num_tensor=num_tensor, encoder=encoder)
        if layout.has_units:
            check_units(layout)
        return layout

    @property
    def num_tensor(self) -> int:
        return self.section.pipeline.ranks_per_layer(self.named_plan)

    def layout(self, cluster: Cluster | None = None) -> Layout:
        cluster, profile = cluster or self.cluster, self.profile
        devices = f"devices of the cluster {cluster}"
        return self.layout_on(cluster.num_devices, devices, len(profile.layers), profile.num_tensor)

    @cached_property
    def profile(self) -> ModelProfile:
        """What each layer costs: named, kept and still true, or made for the cluster's device."""
        named = self.overrides.profile
        if named is None:
            return self._kept_profile() or self.make_profile()
        if self.files is not None:
            self._check_profile(named, is_named=True)
        return named

    def make_profile(self, limits: PackLimits | None = None) -> ModelProfile:
        """Count what layers cost, or measure it for packs of these limits, and keep it."""
        if any(record.module == "sound" for record in self.records):
            raise ConfigError(f"model must be one without sounds to be planned for, got {self.model_folder}")
        check_degree(self.records, self.num_tensor)
        if self.measures:
            return self._saved(self._measured_profile(limits or self.limits))
        return self._saved(self.counted_profile(self.cluster.device))

    def _saved(self, profile: ModelProfile) -> ModelProfile:
        if self.files is not None:
            self.kept.folder.mkdir(parents=True, exist_ok=True)
            profile.save(self.kept.profile)
        return profile

    def corrected_profile(self, calibration: Calibration) -> ModelProfile:
        return calibration.apply(self.counted_profile(Device.named(calibration.counted_for)))

    def take_measured(self, calibration: Calibration) -> None:
        made = self.corrected_profile(calibration)
        self._check_profile(made)
        self.overrides = replace(self.overrides, profile=self._saved(made))

    def counted_profile(self, device: Device, tensor_parallel: int | Mapping[str, int] | None = None) -> ModelProfile:
        dtype, frozen = dtype_of(self.config), self.section.model.frozen
        degrees = self.num_tensor if tensor_parallel is None else tensor_parallel
        return analytic_profile(self.records, device, dtype=dtype, tensor_parallel=degrees, frozen=frozen)

    def _measured_profile(self, limits: PackLimits) -> ModelProfile:
        import torch

        from omnibal.passes import MeasurementWarning, this_device
        from omnibal.vlm.measure import measure_profile

        # Tensor ranks add up what they compute over links, whose speed the cluster says.
        links = self.cluster.device if self.num_tensor > 1 else None
        # Warnings are gathered, not shown: they are part of the answer, in JSON, too.
        with self.working("measuring") as report, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", MeasurementWarning)
            made = measure_profile(
                self.model,
                limits,
                dtype=getattr(torch, dtype_of(self.config)),
                device=this_device(),
                frozen=self.section.model.frozen,
                num_tensor=self.num_tensor,
                report=lambda name: report(f"measuring {name}"),
            )
        self.warnings += [str(entry.message) for entry in caught if issubclass(entry.category, MeasurementWarning)]
        return made if links is None else with_sums(made, self.records, links)

    def _kept_profile(self) -> ModelProfile | None:
        """The run's profile, else that of its what-ifs, if one still fits; says why it does not."""
        if self.files is None:
            return None
        # A what-if reads the run's profile and keeps its own beside it; what replaces takes over what a what-if made.
        for file in (self.files.profile, self.files.what_if.profile):
            if not file.is_file():
                continue
            try:
                found = ModelProfile.load(file)
                self._check_profile(found)
            except ConfigError as error:
                self.say(f"{file} is {'made anew' if file == self.kept.profile else 'left alone'}: {error}")
                continue
            if self.replaces and file != self.files.profile:
                found.save(self.files.profile)
            return found
        return None

    def _check_profile(self, found: ModelProfile, *, is_named: bool = False) -> None:
        """Refuse a profile of other layers or settings, or, unless the command line names it, of another device."""
        found.check_matches(
            records=None if self.section.model.path is None else self.records,
            dtype=dtype_of(self.config),
            tensor_parallel=self.num_tensor,
            frozen=self.section.model.frozen,
        )
        if is_named:
            return
        cluster = self.known_cluster
        if cluster is not None and not found.is_of(cluster.device):
            raise ConfigError(f"profile must be of {cluster.device.name}, got {found.device}")
        if self.measures and not found.versions:
            raise ConfigError("profile must be measured, got a counted one")

    @cached_property
    def samples_per_step(self) -> int | None:
        """Samples that the ds_config asks of a plan's steps, if it does; all samples where they are fewer."""
        asked = self.section.packing.samples_per_step
        if asked is None or asked <= len(self.lengths):
            return asked
        self.say(f"omnibal.packing.samples_per_step is {asked}, a step of the plan has all {len(self.lengths)} samples")
        return len(self.lengths)

    def resolve_plan(self, records: Sequence[LayerRecord], layout: Layout, lengths: SampleLengths | None) -> Plan:
        """The plan that a run on these layers and ranks follows; ``lengths`` None: samples of a stream."""
        return resolve_plan(self.config, self.section, self.named_plan, records, layout, lengths)


def devices_at_hand() -> Cluster | None:
    """This machine's CUDA devices, if it has any; of a kind that something is known of."""
    try:
        import torch
    except ModuleNotFoundError:  # the base install plans too
        return None
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return Cluster(1, count, Device.named(torch.cuda.get_device_name())) if count else None
