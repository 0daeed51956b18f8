"""The one noun of the command line: a ds_config, with what commands about it keep in its run.output."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from omnibal.cli.costs import devices_at_hand, measured_costs, read_cluster
from omnibal.cli.inputs import UsableLengths, measure_dataset, read_lengths
from omnibal.cli.output import say
from omnibal.cluster import Cluster, Layout, replicas_of
from omnibal.config import OmnibalSection, RunFiles, dtype_of, layout_of, micro_batches_of, named_plan
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits, choose_limits
from omnibal.data.source_draws import typical_lengths
from omnibal.errors import ConfigError, DataError
from omnibal.families.base import vision_unit_of
from omnibal.plan import Plan
from omnibal.profile.records import ModelProfile

if TYPE_CHECKING:
    from omnibal.families.base import LayerRecord
    from omnibal.vlm import VisionLanguageModel


class Run:
    """What a command line names: a ds_config, or files where someone has none.

    Lengths, profile, cluster and plan are found, or made and kept, when they are first asked for: what the command line
    names comes first, then what the ds_config says, then what is kept in its ``run.output`` and still fits.

    Args:
        source: What the command line calls its argument.
        config: ds_config without its "omnibal" section.
        section: That section.
        files: Where to keep things; None where there is no ds_config.
        lengths: Of the command line.
        profile: Of the command line.
        cluster: Of the command line.
        plan: Of the command line.
        measure: Whether layers are to be measured, not counted.
        broken: In place of the section's ``data.broken``.
        processes: Most processes that measure lengths.
        replaces: Whether the command may replace the plan that training follows, and its profile.
    """

    def __init__(
        self,
        source: Path,
        config: dict[str, Any],
        section: OmnibalSection,
        files: RunFiles | None,
        *,
        lengths: Sequence[Path] = (),
        profile: ModelProfile | None = None,
        cluster: str | None = None,
        plan: Plan | None = None,
        measure: bool = False,
        broken: Literal["error", "skip"] | None = None,
        processes: int | None = None,
        replaces: bool = False,
    ) -> None:
        self.followed_plan = None if section.pipeline.plan is None else Path(section.pipeline.plan)
        """The plan's file that the ds_config names, be it there or not."""
        if files is not None and self.followed_plan == files.plan and not files.plan.exists():
            say(f"{files.plan} is not there: the ds_config's other keys count until `omnibal plan --write` makes it")
            pipeline = section.pipeline.model_copy(update={"plan": None})
            section = section.model_copy(update={"pipeline": pipeline})
        self.source, self.config, self.section, self._files = source, config, section, files
        self._replaces = replaces
        self.doubts: list[str] = []
        """What makes measured costs doubtful."""
        self._lengths, self._profile, self._plan, self._measure = tuple(lengths), profile, plan, measure
        self._cluster = section.cluster if cluster is None else read_cluster(cluster)
        self._broken, self._processes = broken or section.data.broken, processes

    @property
    def has_config(self) -> bool:
        """Whether the command line names a ds_config."""
        return self._files is not None

    @property
    def files(self) -> RunFiles:
        """Where to keep things."""
        assert self._files is not None, "only a ds_config keeps something"
        return self._files

    @property
    def kept(self) -> RunFiles:
        """Where the command keeps a plan and a profile: beside the plan that training follows unless it replaces it."""
        return self.files if self._replaces or self.followed_plan is None else self.files.what_if

    @property
    def num_micro_batches(self) -> int:
        """Per step and replica, as the ds_config says."""
        return micro_batches_of(self.config)

    @property
    def whole_config(self) -> dict[str, Any]:
        """The ds_config with its section, as trials take it."""
        return self.config | {"omnibal": self.section.model_dump(mode="json")}

    @cached_property
    def model(self) -> "VisionLanguageModel":
        """The ds_config's model."""
        from omnibal.vlm import load_model

        return load_model(self.model_folder, self.section.model.lora, self.section.model.frozen)

    @cached_property
    def records(self) -> "tuple[LayerRecord, ...]":
        """Its layers; of any family that can be planned."""
        from omnibal.vlm import load_records

        return load_records(self.model_folder, self.section.model.lora, self.section.model.frozen)

    @property
    def model_folder(self) -> Path:
        """Its Hugging Face folder.

        Raises:
            ConfigError: The ds_config names none.
        """
        if self.section.model.path is None:
            raise ConfigError(f"omnibal.model.path must name the model's folder, got none in {self.source}")
        return Path(self.section.model.path)

    @property
    def has_lengths(self) -> bool:
        """Whether anything says what samples hold."""
        return bool(self._lengths or self.section.data.train)

    @cached_property
    def lengths(self) -> SampleLengths:
        """What samples hold; under a mixture, samples as it draws them."""
        found, mixture = self.usable_lengths, self.section.data.mixture
        return typical_lengths(found.lengths, found.repeat_time if mixture == "repeat_time" else mixture)

    @property
    def vision_unit(self) -> str:
        """What the model counts images in: tiles or patches."""
        unit = self.lengths.vision_unit
        if unit != "patches" and not self._lengths and self.section.model.path is not None:
            return vision_unit_of(self.records)
        return unit

    @cached_property
    def usable_lengths(self) -> UsableLengths:
        """What samples hold, and what could not be used; measured and kept unless the command line names them.

        Raises:
            ConfigError: Nothing says where they come from, or the model's folder cannot be used.
            DataError: Samples are broken and not to be skipped.
        """
        if self._lengths:
            return read_lengths(self._lengths, "--lengths")
        data = self.section.data
        if not data.train:
            key = f"set omnibal.data.train in {self.source}, or " if self.has_config else ""
            raise ConfigError(f"lengths must be known here, got none; {key}name a folder of lengths with --lengths")
        found = measure_dataset(
            Path(data.train), self.model_folder, image_folder=data.images, max_tiles=data.max_tiles,
            max_image_pixels=data.max_image_pixels,
            broken=self._broken, processes=self._processes, cache=self.files.lengths,
            each_once=data.mixture is not None,
        )  # fmt: skip
        if _kept_hash(self.files.lengths) != found.lengths.content_hash:
            found.lengths.save(self.files.lengths)
        return found

    @cached_property
    def samples_per_step(self) -> int | None:
        """What the ds_config asks of a plan's steps; all samples where they are fewer, as in a first try; or None."""
        asked = self.section.packing.samples_per_step
        if asked is None or asked <= len(self.lengths):
            return asked
        say(f"omnibal.packing.samples_per_step is {asked}, a step of the plan has all {len(self.lengths)} samples")
        return len(self.lengths)

    @property
    def known_cluster(self) -> Cluster | None:
        """The machines: of the command line, the ds_config, the plan, or the CUDA devices at hand; None of no machine.

        Raises:
            ConfigError: Nothing is known of the devices at hand.
        """
        return self._cluster or (None if self._plan is None else self._plan.cluster) or devices_at_hand()

    @cached_property
    def cluster(self) -> Cluster:
        """The same, of some machine.

        Raises:
            ConfigError: Nothing says which.
        """
        found = self.known_cluster
        if found is None:
            key = f'set "omnibal": {{"cluster": …}} in {self.source}, or ' if self.has_config else ""
            raise ConfigError(
                f"cluster must be known here, got none and no CUDA device; {key}say --cluster 4x8xA100-80GB"
            )
        return found

    def layout(self, num_stages: int | None = None, cluster: Cluster | None = None) -> Layout:
        """How the ds_config lies on the cluster, or on another one, with so many stages or as many as it says.

        Raises:
            ConfigError: The stages do not divide the devices, or are more than the layers.
        """
        cluster = cluster or self.cluster
        tensor = self.profile.tensor_parallel
        wanted = num_stages or self.section.pipeline.num_stages
        if wanted == "auto" and self.named_plan is not None:
            wanted = self.named_plan.num_stages
        num_devices, devices = cluster.num_devices, f"devices of the cluster {cluster}"
        stages = num_devices // tensor if wanted == "auto" else wanted
        layers = len(self.profile.layers)
        replicas = replicas_of(stages, num_devices, num_layers=layers, num_tensor=tensor, devices=devices)
        return replace(layout_of(self.config, stages, replicas), num_tensor=tensor)

    @cached_property
    def profile(self) -> ModelProfile:
        """What each layer costs: named, kept, or counted for the cluster's device (measured where that is asked for).

        Raises:
            ConfigError: A named one is of another run, or there is nothing to count or measure.
        """
        if self._profile is not None:
            if self.has_config:
                self._check_profile(self._profile)
            return self._profile
        return self._kept_profile() or self.make_profile()

    def make_profile(self, limits: PackLimits | None = None) -> ModelProfile:
        """Count, or measure, and keep.

        Args:
            limits: Of the largest pack to measure; by default the run's.
        """
        dtype, frozen = dtype_of(self.config), self.section.model.frozen
        if self._measure:
            made, self.doubts = measured_costs(self.model, limits or self.limits, dtype=dtype, frozen=frozen)
        else:
            from omnibal.profile.counted import analytic_profile

            made = analytic_profile(self.records, self.cluster.device, dtype=dtype, frozen=frozen)
        self.kept.folder.mkdir(parents=True, exist_ok=True)
        made.save(self.kept.profile)
        return made

    @property
    def limits(self) -> PackLimits:
        """What the ds_config says that a pack may hold, or the paper's rule for its data."""
        packing = self.section.packing
        return choose_limits(self.lengths, packing.vision_units, packing.llm_tokens)

    def _check_profile(self, profile: ModelProfile) -> None:
        records = None if self.section.model.path is None else self.records
        profile.check_matches(records=records, dtype=dtype_of(self.config), frozen=self.section.model.frozen)

    def _kept_profile(self) -> ModelProfile | None:
        """The run's profile, or that of its what-ifs, if one still fits; says why it does not."""
        for file in (self.files.profile, self.files.what_if.profile):
            if not file.is_file():
                continue
            try:
                found = self._fitting_profile(file)
            except ConfigError as error:
                say(f"{file} is {'made anew' if file == self.kept.profile else 'left alone'}: {error}")
                continue
            if self._replaces and file != self.files.profile:
                found.save(self.files.profile)
            return found
        return None

    def _fitting_profile(self, file: Path) -> ModelProfile:
        found, cluster = ModelProfile.load(file), self.known_cluster
        self._check_profile(found)
        if cluster is not None and not found.is_of(cluster.device):
            raise ConfigError(f"profile must be of {cluster.device.name}, got {found.device}")
        if self._measure and not found.versions:
            raise ConfigError("profile must be measured, got a counted one")
        return found

    @cached_property
    def plan(self) -> Plan:
        """The plan of the command line or the ds_config, or the kept one if it fits, or a new one; with a cluster.

        Raises:
            ConfigError: It does not fit the profile.
        """
        plan = self.named_plan or self._kept_plan()
        if plan is None:
            from omnibal.cli.plan import make_kept_plan

            plan = make_kept_plan(self)
        if plan.partition.num_layers != len(self.profile.layers):
            raise ConfigError(
                f"plan must be of the profile's {len(self.profile.layers)} layers, got {plan.partition.num_layers}"
                + "; `omnibal plan --write` makes another" * self.has_config
            )
        # A plan may name a level for all layers alike; costs do not tell all levels of all layers apart.
        recompute = self.profile.levels_like(plan.recompute)
        return replace(plan, recompute=recompute, cluster=self._cluster or plan.cluster or self.cluster)

    @cached_property
    def named_plan(self) -> Plan | None:
        """The plan of the command line or the ds_config, if they name one."""
        return self._plan or named_plan(self.section)

    def _kept_plan(self) -> Plan | None:
        """The kept plan, if it still fits; says why it does not."""
        if not self.has_config or not self.kept.plan.is_file():
            return None
        try:
            plan = Plan.load(self.kept.plan)
            now = layout_of(self.config, plan.num_stages, plan.layout.num_replicas)
        except ConfigError as error:
            say(f"{self.kept.plan} is made anew: {error}")
            return None
        pairs = {
            "lengths": (plan.made_from.get("lengths"), self.lengths.content_hash),
            "costs": (plan.made_from.get("profile"), self.profile.content_hash),
            "ZeRO stage": (plan.layout.zero_stage, now.zero_stage),
            "sums of gradients": (plan.layout.sums_float32, now.sums_float32),
            "cluster": (plan.cluster, self._cluster or plan.cluster),
            **self._asked_again(plan),
        }
        changed = [name for name, (was, is_now) in pairs.items() if was != is_now]
        if changed:
            say(f"{self.kept.plan} is made anew: {', '.join(changed)} changed")
            return None
        return plan

    def _asked_again(self, plan: Plan) -> dict[str, tuple[Any, Any]]:
        """What a plan is, or was asked for, and what the ds_config says now, where it says anything."""
        packing, pipeline, asked = self.section.packing, self.section.pipeline, plan.made_from.get("request", {})
        was_and_is = {
            "number of stages": (plan.num_stages, pipeline.num_stages),
            "schedule": (plan.schedule, pipeline.schedule),
            "samples of a step": (asked.get("global_batch"), self.samples_per_step or "auto"),
            "method of packing": (asked.get("method", packing.method), packing.method),
            "seed of packing": (asked.get("seed", packing.seed), packing.seed),
        }
        return {name: (was, was if now == "auto" else now) for name, (was, now) in was_and_is.items()}


def _kept_hash(folder: Path) -> str | None:
    try:
        return SampleLengths.load(folder).content_hash
    except DataError:
        return None
