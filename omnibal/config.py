"""The "omnibal" section of a ds_config, and the rules that a ds_config must keep under a pipeline."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omnibal.cluster import Layout, Precision
from omnibal.data.policies import EXCHANGE_STEPS, ITERATIONS
from omnibal.errors import ConfigError
from omnibal.memory.footprint import Level
from omnibal.pipeline.schedule import ScheduleName
from omnibal.records import explain, read_json

SECTIONS = ("bf16", "fp16", "zero_optimization", "data_types", "torch_autocast", "optimizer", "scheduler")
"""Keys of a ds_config whose inner keys matter here."""
Count = Annotated[int, Field(ge=1)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Section(BaseModel):
    """A part of the configuration: immutable, unknown keys refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class ModelSection(Section):
    """Which model is trained."""

    path: str | None = None
    """Hugging Face folder (config.json, weights, tokenizer, preprocessor)."""
    weights: Literal["load", "random"] = "load"
    """``load`` reads the folder's safetensors; ``random`` draws initial weights from ``seed``."""
    seed: int = 0
    """Seed of random initial weights and of dropout."""
    frozen: list[str] = []
    """Kinds of layers that are not trained, such as ``vision_block``."""


class DataSection(Section):
    """Which samples it is trained on: InternVL meta files, or annotations as LLaVA has them."""

    train: str | None = None
    held_out: str | None = None
    images: str | None = None
    """Folder that images of annotations are in, by default the annotations' own; meta files name theirs."""
    max_tiles: Count = 12
    """The most tiles an image is cut into (a thumbnail comes on top)."""
    broken: Literal["error", "skip"] = "error"
    """What to do with samples that cannot be read: stop, or leave them out and report each."""
    workers: Annotated[int, Field(ge=0)] | None = None
    """DataLoader processes on each rank that decodes images; left out, as many as a step's images need, if there are
    cores for them; 0: the rank's own process reads, and each step waits for its data."""


class PackingSection(Section):
    """Which samples share a micro-batch."""

    vision_units: Count | None = None
    llm_tokens: Count | None = None
    """The most a pack may hold; left out, the paper's rule chooses from the lengths."""
    full_vision_units: Count | None = None
    full_llm_tokens: Count | None = None
    """From where on a pack is full, for ``isf``: the paper's Q'v and Q't; by default its own."""
    method: Literal["balanced", "isf", "random"] = "balanced"
    iterations: Count = ITERATIONS
    """Rounds of ``isf``: the paper's T."""
    oversized: Literal["alone", "error", "drop"] = "alone"
    exchange_steps: Count = EXCHANGE_STEPS
    """Consecutive steps that may exchange samples for balance; 1 keeps every step exactly as it was drawn."""
    seed: int = 0


class PipelineSection(Section):
    """Where the model is cut and what recomputes."""

    num_stages: Count | Literal["auto"] = "auto"
    """``auto``: all processes form one pipeline."""
    partition: Literal["uniform", "parameters"] | list[int] = "parameters"
    """A method, or the boundaries themselves: ``[0, 5, 14]`` gives stages of layers 0–4 and 5–13."""
    recompute: Level | list[Level] = "none"
    """One level for all layers, or a list with one for each."""
    schedule: ScheduleName | Literal["auto"] = "auto"
    """``1f1b``, ``zero-bubble``, ``zero-bubble-lean``, or ``auto``: the plan's choice, ``1f1b`` without a plan."""
    plan: str | None = None
    """A plan.json; it takes the place of ``partition``, ``recompute`` and the packing limits."""


class LearningRates(Section):
    """Learning rates of single modules; left out, that of the ds_config's "optimizer"."""

    vision: Rate | None = None
    """Of the patch embedding and the ViT's blocks."""
    projector: Rate | None = None
    language: Rate | None = None
    """Of the language model, its embedding and its head."""


class OptimizerSection(Section):
    """Which parameters the optimizer treats in another way than the ds_config's "optimizer" says."""

    weight_decay: Literal["all", "matrices"] = "all"
    """``matrices``: none on parameters of one dimension, which are norms, biases and layer scales."""
    learning_rates: LearningRates = LearningRates()


class RunSection(Section):
    """How `omnibal.train` runs."""

    output: str = "runs/train"
    """Folder of all that the run keeps; all hosts share it."""
    epochs: Count = 1
    save_every: Annotated[int, Field(ge=0)] = 0
    """Steps between checkpoints; 0: only at the end."""
    keep: Count = 2
    """How many of the newest checkpoints stay."""
    evaluate_every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations on the held-out data; 0: only at the end."""


class OmnibalSection(Section):
    """The whole section."""

    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    packing: PackingSection = PackingSection()
    pipeline: PipelineSection = PipelineSection()
    optimizer: OptimizerSection = OptimizerSection()
    run: RunSection = RunSection()


def read_config(config: str | Path | dict[str, Any]) -> tuple[dict[str, Any], OmnibalSection]:
    """Split a ds_config into what DeepSpeed reads and the validated "omnibal" section.

    Args:
        config: Path of a JSON file, or its content.

    Returns:
        The ds_config without the section, and the section (defaults where it is left out).

    Raises:
        ConfigError: The file is missing or no JSON object, or a key or value of the section is wrong; the message
            names the key and the nearest known one.
    """
    content = config if isinstance(config, dict) else _read_json(Path(config))
    deepspeed_config = {key: value for key, value in content.items() if key != "omnibal"}
    for key in SECTIONS:
        if not isinstance(deepspeed_config.get(key, {}), dict):
            raise ConfigError(f"{key} of a ds_config must be an object, got {deepspeed_config[key]!r:.80}")
    try:
        return deepspeed_config, OmnibalSection.model_validate(content.get("omnibal", {}))
    except ValidationError as error:
        raise ConfigError(explain(OmnibalSection, error, "omnibal")) from None


def _read_json(path: Path) -> dict[str, Any]:
    content = read_json(path, "ds_config")
    if not isinstance(content, dict):
        raise ConfigError(f"ds_config must be a JSON object, got {path} with a {type(content).__name__}")
    return content


def complete_deepspeed_config(
    config: dict[str, Any],
    *,
    num_stages: int,
    num_replicas: int,
    total_steps: int,
    schedule: ScheduleName = "1f1b",
) -> dict[str, Any]:
    """Fill in what follows from the pipeline, and refuse what cannot be right under one.

    Args:
        config: ds_config without the "omnibal" section.
        num_stages: Pipeline stages.
        num_replicas: Data-parallel ranks.
        total_steps: Optimizer steps of the whole run; takes the place of ``"auto"`` in the scheduler's
            ``total_num_steps``, and a twentieth of it in ``warmup_num_steps``.
        schedule: What the pipeline runs.

    Returns:
        A ds_config with the micro-batch size 1 (one pack), the accumulation steps and the train batch size; without
        ZeRO's contiguous gradients, whose two buffers of ``reduce_bucket_size`` are of no use where gradients stay,
        and without the waiting of DeepSpeed's throughput timer, which drains the device before each forward pass;
        with bfloat16 gradients summed in float32 (``sums_in_float32``) unless it says otherwise.

    Raises:
        ConfigError: float16; ZeRO stage 2 or 3; a micro-batch size other than 1; batch sizes that contradict each
            other; gradient clipping that DeepSpeed would get wrong (fp32, ZeRO stage 0, several stages: the norm then
            counts only the first stage; a ds_config that does not mention clipping clips at 1.0); checkpoints written
            in the background; what cannot be under a zero-bubble schedule.
    """
    micro_batches = micro_batches_of(config)
    _check_zero(config)
    _check_clipping(config, num_stages)
    _check_writer(config)
    if schedule != "1f1b":
        _check_deferral(config)
    derived = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": micro_batches,
        "train_batch_size": micro_batches * num_replicas,
    }
    for key, value in derived.items():
        given = config.get(key, "auto")
        if given not in ("auto", value):
            raise ConfigError(
                f"{key} must be {value} ({micro_batches} micro-batches of one pack, {num_replicas} replicas), "
                f"got {given!r}; leave it out or say 'auto'"
            )
    zero = {"contiguous_gradients": False} | config.get("zero_optimization", {})
    timer = {"synchronized": False} | config.get("timers", {}).get("throughput", {})
    sums = {"grad_accum_dtype": "fp32"} if sums_in_float32(config) else {}
    return {
        **config,
        **derived,
        "zero_optimization": zero,
        "timers": {**config.get("timers", {}), "throughput": timer},
        "data_types": sums | config.get("data_types", {}),
        **_complete_scheduler(config, total_steps),
    }


def layout_of(config: dict[str, Any], num_stages: int, num_replicas: int) -> Layout:
    """How a run under a ds_config lies on its devices.

    Args:
        config: ds_config without the "omnibal" section.
        num_stages: Pipeline stages.
        num_replicas: Data-parallel ranks.

    Raises:
        ConfigError: float16, or a ZeRO stage that a pipeline does not have.
    """
    _check_zero(config)
    return Layout(
        num_stages,
        num_replicas,
        zero_stage=config.get("zero_optimization", {}).get("stage", 0),
        precision=dtype_of(config),
        accumulate_float32=sums_in_float32(config),
    )


_FLOAT32_NAMES = ("fp32", "float32", "float", "torch.float32")
"""DeepSpeed's names."""


def sums_in_float32(config: dict[str, Any]) -> bool:
    """Whether gradients of a bfloat16 run are summed over a step's micro-batches in float32.

    ``data_types.grad_accum_dtype`` decides; left out, they are under ZeRO stage 1 (under stage 0 DeepSpeed cannot).
    That takes 4 bytes more a trained parameter. In bfloat16 each sum is rounded to 8 bits: after 32 micro-batches it is
    off by 0.6 %, after 128 by 1.1 %.
    """
    if dtype_of(config) != "bfloat16":
        return False
    given = config.get("data_types", {}).get("grad_accum_dtype")
    if given is None:
        return bool(config.get("zero_optimization", {}).get("stage", 0) == 1)
    return given in _FLOAT32_NAMES


def dtype_of(config: dict[str, Any]) -> Precision:
    """What the layers compute in, by its name in torch: bfloat16 where the ds_config enables it, else float32.

    Raises:
        ConfigError: It enables float16, whose gradients would need a loss scale that the engine does not keep.
    """
    if config.get("fp16", {}).get("enabled", False):
        raise ConfigError(
            f"fp16.enabled must be false, got {config['fp16']['enabled']!r}; enable bf16, or neither for float32"
        )
    return "bfloat16" if config.get("bf16", {}).get("enabled", False) else "float32"


def micro_batches_of(config: dict[str, Any]) -> int:
    """Micro-batches per step: ``gradient_accumulation_steps`` of the ds_config, 1 where it is left out."""
    micro_batches = config.get("gradient_accumulation_steps", 1)
    if isinstance(micro_batches, bool) or not isinstance(micro_batches, int) or micro_batches < 1:
        raise ConfigError(
            "gradient_accumulation_steps must be a positive integer (the micro-batches of a step), "
            f"got {micro_batches!r}"
        )
    return micro_batches


def check_learning_rates(config: dict[str, Any], rates: LearningRates) -> None:
    """Refuse a scheduler of DeepSpeed's that would give all modules one learning rate.

    Args:
        config: ds_config without the "omnibal" section.
        rates: Of its section.

    Raises:
        ConfigError: The scheduler sets learning rates instead of scaling those of the optimizer.
    """
    given = [name for name, rate in rates if rate is not None]
    scheduler = config.get("scheduler", {})
    setting = [key for key in ("warmup_max_lr",) if scheduler.get("params", {}).get(key) is not None]
    if given and (setting or scheduler.get("type") in ("OneCycle", "LRRangeTest")):
        raise ConfigError(
            f"scheduler must scale the optimizer's learning rates with omnibal.optimizer.learning_rates.{given[0]}, "
            f"got {scheduler.get('type')} with {setting[0] if setting else 'rates of its own'}; "
            "leave warmup_max_lr out, or take WarmupCosineLR"
        )


def _check_zero(config: dict[str, Any]) -> None:
    stage = config.get("zero_optimization", {}).get("stage", 0)
    if stage not in (0, 1):
        raise ConfigError(
            f"zero_optimization.stage must be 0 or 1 with a pipeline, got {stage!r}; "
            "DeepSpeed's pipeline engine keeps gradients and parameters whole on each stage"
        )


def _check_clipping(config: dict[str, Any], num_stages: int) -> None:
    is_float32 = dtype_of(config) == "float32"
    clipping = config.get("gradient_clipping", 1.0)
    if num_stages > 1 and is_float32 and config.get("zero_optimization", {}).get("stage", 0) == 0 and clipping != 0:
        given = repr(clipping) if "gradient_clipping" in config else "none (DeepSpeed then clips at 1.0)"
        raise ConfigError(
            f"gradient_clipping must be 0 with fp32, ZeRO stage 0 and {num_stages} pipeline stages, got {given}; "
            "the norm would count the first stage only: set zero_optimization.stage to 1, or clipping to 0"
        )


def _check_writer(config: dict[str, Any]) -> None:
    """Refuse checkpoints that are written behind a run's back: nobody would know when one is whole."""
    writer = (config.get("checkpoint") or {}).get("writer") or {}
    given = {
        "checkpoint.writer.decoupled": writer.get("decoupled", False),
        "datastates_ckpt": config.get("datastates_ckpt", False),
    }
    for key, value in given.items():
        if value is not False:
            raise ConfigError(f"{key} must be left out, got {value!r}; the ranks wait until a checkpoint is whole")


def _check_deferral(config: dict[str, Any]) -> None:
    """Refuse what takes gradients from autograd's hooks, which deferred ones do not pass, or casts within a layer."""
    for section, key in (
        ("zero_optimization", "overlap_comm"),
        ("bf16", "immediate_grad_update"),
        ("torch_autocast", "enabled"),
    ):
        if config.get(section, {}).get(key, False):
            raise ConfigError(
                f"{section}.{key} must be false under zero-bubble, got true; set it to false, or "
                "omnibal.pipeline.schedule to '1f1b'"
            )


def _complete_scheduler(config: dict[str, Any], total_steps: int) -> dict[str, Any]:
    if "scheduler" not in config:
        return {}
    scheduler = config["scheduler"]
    automatic = {"total_num_steps": total_steps, "warmup_num_steps": max(1, total_steps // 20)}
    parameters = {
        key: automatic[key] if value == "auto" and key in automatic else value
        for key, value in scheduler.get("params", {}).items()
    }
    return {"scheduler": {**scheduler, "params": parameters}}
