"""The "omnibal" section of a ds_config: its keys, what each means, and what it may be."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from omnibal.cluster import ClusterValue, Encoder
from omnibal.data.packing_spec import EXCHANGE_STEPS, Mixture, PackingOptions
from omnibal.pipeline.schedule import ScheduleName
from omnibal.plan import Plan
from omnibal.profile.records import Level

Count = Annotated[int, Field(ge=1)]
# A path; a shell would replace `~`, JSON does not.
UserPath = Annotated[str, AfterValidator(lambda path: str(Path(path).expanduser()) if path.startswith("~") else path)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


def _mixture(value: Any) -> Any:
    return value if value in (None, "repeat_time") else Mixture.of(value)


MixtureSetting = Annotated[Mixture | Literal["repeat_time"] | None, BeforeValidator(_mixture)]


class Section(BaseModel):
    """A part of the configuration: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class LoraSection(Section):
    """Low-rank adapters that are trained in place of the model's weights (Hu et al., LoRA, 2021)."""

    rank: Count = 16
    """Inner size of an adapter's two matrices; each adapted layer gets ``rank * (inputs + outputs)`` parameters."""
    alpha: Count | None = None
    """What an adapter adds is multiplied by ``alpha / rank``; left out, it is twice the rank, as in LLaVA's recipe."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability of dropping a value of an adapter's input. Above 0 each adapter keeps its own copy of that input for
    the backward pass."""
    targets: Annotated[list[str], Field(min_length=1)] = ["language"]
    """Which linear layers get an adapter: modules (``language``: all but the head), kinds of layers
    (``decoder_block``; ``vision_block`` is every block of the ViT), or names and ends of names in the Hugging Face
    model (``q_proj``). Frozen ones get none."""
    modules_to_save: list[str] = []
    """What is trained whole beside the adapters: modules (``projector``), kinds of layers (``final_norm``), or names
    and ends of names in the Hugging Face model (``embed_tokens``)."""


class ModelSection(Section):
    """Which model is trained."""

    path: UserPath | None = None
    """Hugging Face folder (config.json, weights, tokenizer, preprocessor)."""
    family: str | None = None
    """Python module that registers the model's family, where it is none of omnibal's; see models.md. Every command
    and process imports it: its code runs."""
    weights: Literal["load", "random"] = "load"
    """``load`` reads the folder's safetensors; ``random`` draws initial weights from ``seed``."""
    seed: int = 0
    """Seed of random initial weights and of dropout."""
    frozen: list[str] = []
    """What is not trained: modules (``vision``, ``projector``, ``language``), kinds of layers (``vision_block``: every
    block of the ViT; ``only:window_block``: Qwen2.5-VL's windowed ones alone), or patterns of weights' names on disk
    (``*.layers.[0-3].*``). See models.md for where modules end."""
    lora: LoraSection | None = None
    """Train adapters, and leave the model's weights as they are; ``{}`` takes the defaults."""


class DataSection(Section):
    """Which samples it is trained on: any records in any files that data.md lists."""

    train: UserPath | None = None
    """What is trained on: a meta file, annotations, or a folder of annotations."""
    held_out: UserPath | None = None
    """What is evaluated on, alike; left out, nothing."""
    images: UserPath | None = None
    """Folder that images of annotations are in, by default the annotations' own; meta files name theirs."""
    max_tiles: Count | None = None
    """The most tiles an image is cut into (a thumbnail comes on top); left out, what the model's folder says."""
    max_image_pixels: Count = 89_478_485
    """The most pixels that an image file may have, width times height: one that has more counts as broken. Decoded, a
    pixel takes three bytes, on each process that reads images. (Models' own limits, to which their processors scale
    images down, stand in the model's folder.)"""
    broken: Literal["error", "skip"] = "error"
    """What to do with samples that cannot be read, found before training or while training reads them: stop, or leave
    them out and report each."""
    decode: bool | None = None
    """Whether images, videos and sounds are decoded when lengths are measured, so that broken ones are known before
    training: a file once, as long as its size and time of change stay. Left out, if there are at most 5,000 items."""
    streaming: bool = False
    """Whether annotations (no JSON arrays) are read row by row, in their order, as they are needed: nothing is
    measured beforehand. It wants ``run.max_steps`` and the limits of ``packing``; see streams.md."""
    mixture: MixtureSetting = None
    """What share each source gets: ``{"ocr": 0.3, "chat": 0.7}``, by the names that the meta file gives its datasets
    (of annotation files, theirs), with a schedule or by tokens, too: see streams.md. ``"repeat_time"``: what the meta
    file repeats; of 0.5, each epoch another half. Left out: ``repeat_time`` as InternVL has it, each epoch the same."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """DataLoader processes on each rank that decodes images; left out, one for each of its cores but one, and no more
    than a step has packs; 0: the rank's own process reads, and each step waits for its data."""
    ray: str | None = None
    """Address of a Ray cluster whose processors read images in place of ``workers`` (``"auto"``: the one that this
    machine belongs to); see data.md. Streams are read here."""


class PackingSection(Section):
    """Which samples share a micro-batch."""

    vision_units: Count | None = None
    """The most tiles or patches in a pack; left out, the OmniBal paper's rule chooses from the lengths."""
    llm_tokens: Count | None = None
    """The most LLM tokens in a pack; left out, the OmniBal paper's rule chooses from the lengths."""
    method: Literal["balanced", "isf", "random"] = "balanced"
    """``balanced``; ``isf``, the OmniBal paper's packing; or ``random``, samples as they are drawn."""
    oversized: Literal["alone", "error", "drop"] = "alone"
    """Samples that exceed a limit on their own: each in a pack of its own, refused, or left out. Of streams the log
    names the first one, and metrics and report count them."""
    exchange_steps: Count = EXCHANGE_STEPS
    """Consecutive steps that may exchange samples for balance; 1 keeps every step exactly as it was drawn."""
    samples_per_step: Count | None = None
    """What `omnibal plan` keeps whatever packs are like; left out, what a step of this configuration holds on
    average."""
    seed: int = 0
    """Decides every draw: the same seed gives the same epochs."""

    @property
    def options(self) -> PackingOptions:
        return PackingOptions(
            method=self.method, seed=self.seed, oversized=self.oversized, exchange_steps=self.exchange_steps
        )


class EncoderSection(Section):
    """Devices of the encoder's own (units): its replicas need not be as many as those of the language model."""

    num_stages: Count = 1
    """How many of the first stages hold it; ``pipeline.num_stages`` counts these, too."""
    num_replicas: Count
    """How many replicas these stages have: a divisor or a multiple of the language model's. Beside it the other
    processes are divided into replicas of the other stages."""


def _no_encoder_beside(num_tensor: int | str, info: ValidationInfo) -> int | str:
    if num_tensor not in (1, "auto") and info.data.get("encoder") is not None:
        raise PydanticCustomError("alone", "Input should be 1 or 'auto' beside omnibal.pipeline.encoder")
    return num_tensor


class PipelineSection(Section):
    """Where the model is cut and what recomputes."""

    num_stages: Count | Literal["auto"] = "auto"
    """``auto``: as many as the plan says; without a plan all processes form one pipeline. `omnibal plan` keeps to a
    number."""
    encoder: EncoderSection | Literal["spread"] | None = None
    """``spread``: all processes encode a share of a step's images, before the language model's pipeline and behind it.
    Left out: the plan's, where a plan is named; else the encoder has the replicas of all other stages."""
    num_tensor: Annotated[Count | Literal["auto"], AfterValidator(_no_encoder_beside)] = 1
    """Ranks that share each layer, for models that are too large without them; see layouts.md. ``auto``: as many as the
    plan says; without a plan 1."""
    partition: Literal["uniform", "parameters"] | list[int] = "parameters"
    """A method, or the boundaries themselves: ``[0, 5, 14]`` gives stages of layers 0–4 and 5–13. A method cuts encoder
    and language model apart where the encoder has devices of its own, and the language model alone where the encoder is
    spread; the layers of such an encoder are counted with the first stage."""
    recompute: Level | list[Level] = "none"
    """One level for all layers, or a list with one for each."""
    schedule: ScheduleName | Literal["auto"] = "auto"
    """``1f1b``, ``zero-bubble``, ``zero-bubble-lean``, or ``auto``: the plan's choice, ``1f1b`` without a plan. Beside
    an encoder with devices of its own it is the language model's, and transfers never block."""
    plan: UserPath | Literal["auto"] | None = None
    """A plan.json; it takes the place of ``partition``, ``recompute``, the packing limits and the batch. Left out: the
    one that `omnibal plan --write` has put into ``run.output``, if any; ``auto``: likewise, and no run begins without
    one."""

    def encoder_on(self, num_devices: int, plan: Plan | None) -> Encoder | None:
        if isinstance(self.encoder, EncoderSection):
            return Encoder(self.encoder.num_stages, self.encoder.num_replicas)
        if self.encoder == "spread" or (plan is not None and plan.layout.is_spread):
            return Encoder.on_all(num_devices)
        return None if plan is None else plan.layout.encoder

    def ranks_per_layer(self, plan: Plan | None) -> int:
        if self.num_tensor != "auto":
            return self.num_tensor
        return 1 if plan is None else plan.layout.num_tensor

    def stages_on(self, num_devices: int, num_tensor: int, encoder: Encoder | None, plan: Plan | None) -> int:
        if self.num_stages != "auto":
            return self.num_stages
        if plan is not None:
            return plan.num_stages
        if encoder is not None and encoder.placement == "own":  # all other devices are one pipeline
            return encoder.num_stages + max(num_devices - encoder.num_devices, 1)
        return num_devices // num_tensor


class LearningRates(Section):
    """Learning rates of single modules; left out, that of the ds_config's "optimizer"."""

    vision: Rate | None = None
    """Rate of the ViT: patch embedding, blocks (Qwen3-VL's with their deep-stack mergers) and last norm."""
    projector: Rate | None = None
    """Rate of the projector, which takes the ViT's last output to the language model."""
    language: Rate | None = None
    """Rate of the language model, its embedding and its head."""


class OptimizerSection(Section):
    """Which parameters the optimizer treats in another way than the ds_config's "optimizer" says."""

    weight_decay: Literal["all", "matrices"] = "all"
    """``matrices``: none on parameters of one dimension, which are norms, biases and layer scales."""
    learning_rates: LearningRates = LearningRates()


class _File:
    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, files: "RunFiles", owner: type | None = None) -> Path:
        return files.folder / self.name


@dataclass(frozen=True)
class RunFiles:
    """Where a run and the commands about it keep what they make: fixed names in ``run.output``."""

    folder: Path
    lengths: ClassVar = _File("lengths")  # a folder: the training samples' lengths, and what was measured of any data
    profile: ClassVar = _File("profile.json")  # what each layer costs
    plan: ClassVar = _File("plan.json")  # what `omnibal plan --write` chose, and training follows
    run_plan: ClassVar = _File("run_plan.json")  # what the run was begun with, and resumes under
    metrics: ClassVar = _File("metrics.jsonl")  # a line for each step and each evaluation
    monitor: ClassVar = _File("monitor")  # a folder: what DeepSpeed's monitors write
    loss_curve: ClassVar = _File("loss.png")
    lock: ClassVar = _File("lock")  # held while a run trains into the folder
    checkpoints: ClassVar = _File("checkpoints")  # a folder
    model: ClassVar = _File("model")  # the newest checkpoint as a Hugging Face folder
    exported: ClassVar = _File("model.json")  # which checkpoint `model` is of
    report: ClassVar = _File("report.html")  # what `omnibal report` writes

    @property
    def what_if(self) -> "RunFiles":
        """Plans that training does not follow, and profiles that the plan that it follows is not made from."""
        return RunFiles(self.folder / "what-if")


class RunSection(Section):
    """How `omnibal.train` runs."""

    output: UserPath = "runs/train"
    """Folder of all that the run and commands about it keep; all hosts share it. Left out, ``runs/`` and the name of
    the ds_config's file."""
    epochs: Count = 1
    """How often every sample is trained on; under a mixture, how many times as many samples as there are."""
    max_steps: Count | None = None
    """Steps of the whole run, in place of epochs."""
    save_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0: only at the end."""
    async_save: bool = False
    """Write checkpoints while training goes on; the host keeps a copy of what each rank saves until then. The last one
    is waited for, and so is one before an evaluation."""
    keep: Count = 2
    """How many of the newest checkpoints stay."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations on the held-out data; 0: only at the end."""
    watchdog_seconds: Annotated[float, Field(ge=0)] = 300.0
    """How long a rank may stand at one instruction of a step before it says for whom it waits; after three times as
    long it ends with status 75. A first step that compiles kernels for minutes wants more; 0: no watchdog. See
    troubleshooting.md."""
    not_finite: Literal["skip", "error"] = "skip"
    """What to do with a step whose loss or gradients are not finite: leave it out, with a warning that names its
    samples, up to five in a row; or end the run at the first one."""

    @property
    def files(self) -> RunFiles:
        return RunFiles(Path(self.output))


class OmnibalSection(Section):
    """The whole section."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    packing: PackingSection = PackingSection()
    pipeline: PipelineSection = PipelineSection()
    optimizer: OptimizerSection = OptimizerSection()
    run: RunSection = RunSection()
    cluster: ClusterValue | None = None
    """What it is planned for: such as ``4x8xA100-80GB``, or a record of ``omnibal.cluster.Cluster``; left out, the CUDA
    devices at hand. Training itself takes the processes that are launched."""
