"""What a Trainer's settings and model say of its steps and ranks, and which of them packs refuse.

No transformers is imported before a Trainer of transformers 5 is checked: ``replace_loader`` serves older ones.
"""

import sys
from collections.abc import Mapping
from copy import copy
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, get_args

from packaging.version import Version

from omnibal.advise.memory import RankMemory
from omnibal.advise.wait import Sharding
from omnibal.cluster import OVERHEAD_BYTES, Cluster
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.device import Device
from omnibal.errors import ConfigError, integer, reporting
from omnibal.integrations.trainer.memory import GIB, HeldBytes, device_gib
from omnibal.integrations.trainer.steps import AskedSteps, counted_profile, module_of
from omnibal.packs.collator import FAMILIES
from omnibal.passes import device_name
from omnibal.profile.records import Level, ModelProfile
from omnibal.ranks import gather

if TYPE_CHECKING:
    from transformers import Trainer

Head = Literal["targets", "all"]
"""The rows that a model's head works on in training: those that predict a target, where that is exact, or all."""
SFT_FLOOR: Final = "1.16"  # the oldest TRL in the tests: its loss is called with the target tokens of the whole step
FLOOR: Final = "5.23"  # the oldest transformers that the tests run with: balance changes what Trainer does inside
COUNTED_BY_ACCELERATE: Final = "4.52"  # before it, Accelerate divides losses by the micro-batches of a step


class Rule(NamedTuple):
    """Which values of a setting packs allow."""

    only: tuple[Any, ...]
    why: str
    of_loader: bool = False
    """Whether a trainer whose loader alone is replaced refuses other values, too."""


RULES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "train_sampling_strategy": Rule(("random",), "balance draws packs"),
        "remove_unused_columns": Rule((False,), "it drops what the collator reads"),
        "average_tokens_across_devices": Rule((True,), "the loss is that of all ranks' target tokens"),
        "label_smoothing_factor": Rule((0.0,), "the loss knows no smoothing"),
        "neftune_noise_alpha": Rule((None,), "its noise shrinks with the length of what is run"),
        "auto_find_batch_size": Rule((False,), "packs do not shrink", of_loader=True),
        "dataloader_drop_last": Rule((False,), "each sample is trained once an epoch", of_loader=True),
        "dataloader_in_order": Rule((True,), "the packs of a step belong together", of_loader=True),
        "accelerator_config.dispatch_batches": Rule((None, False), "each rank reads its own packs", of_loader=True),
        # Of TRL's SFTConfig.
        "packing": Rule((False, None), "balance packs"),
        "padding_free": Rule((False, None), "balance packs"),
    }
)
"""Settings that packs refuse; of every other one a test says whether packs honour it or it does not matter to them."""


def refuse_values(args: Any, *, of_loader: bool = False) -> None:
    """Refuse settings by their rules, under ``of_loader`` only what a replaced loader would break."""
    # A field that an older or newer transformers lacks is as it is by default.
    for name, rule in RULES.items():
        if of_loader and not rule.of_loader:
            continue
        *outer, field = name.split(".")
        holder = getattr(args, outer[0], None) if outer else args
        value = getattr(holder, field, rule.only[0])
        if value not in rule.only:
            raise ConfigError(f"{name} must be {rule.only[0]} to train on packs, got {value}; {rule.why}")


def refuse_settings(trainer: "Trainer") -> None:
    """Refuse what packs would silently break, or be broken by; the message says what each must be."""
    import transformers

    if Version(transformers.__version__) < Version(FLOOR):
        raise ConfigError(
            f"transformers must be {FLOOR} or newer, got {transformers.__version__}; "
            "omnibal.integrations.loops.replace_loader serves older ones"
        )
    kind = type(trainer)
    if "get_train_dataloader" in vars(trainer):
        raise ConfigError("balance must be called once for a trainer, got one that trains on packs")
    of_loss = () if keeps_sft_loss(trainer) else ("compute_loss", "training_step")
    for method in ("get_train_dataloader", "_get_train_sampler", *of_loss):
        if getattr(kind, method) is not getattr(transformers.Trainer, method):
            raise ConfigError(
                f"trainer must have Trainer's own {method}, got that of {kind.__name__}; "
                "omnibal.integrations.loops.replace_loader(trainer, limits, model=model) changes its loader alone"
            )
    refuse_values(trainer.args)
    _refuse_shared_ranks(trainer)
    model = model_of(trainer)
    if not hasattr(model, "config"):
        raise ConfigError(f"model must be one of transformers' to train on packs, got {type(model).__name__}")
    if trainer.compute_loss_func is not None:
        raise ConfigError(
            "compute_loss_func must be None to train on packs, got one; their loss is exact over all tokens"
        )


def _refuse_shared_ranks(trainer: "Trainer") -> None:
    """Refuse ranks that share a batch in a way that packs cannot be shared, or that Trainer does not tell."""
    for name, ranks in (("pipeline-parallel ranks", _of_mesh(trainer, "pp_size")), ("n_gpu", trainer.args.n_gpu)):
        if ranks > 1:
            raise ConfigError(f"{name} must be 1 to train on packs, got {ranks}; a pack is on one device")
    deepspeed_config = (
        trainer.accelerator.state.deepspeed_plugin.deepspeed_config if trainer.is_deepspeed_enabled else {}
    )
    shared = (deepspeed_config.get("tensor_parallel") or {}).get("autotp_size", 0)
    if shared not in (0, 1):
        raise ConfigError(
            f"tensor_parallel.autotp_size must be 1 to train on packs, got {shared}; ranks that share layers need one "
            "pack, and Trainer does not say which they are: DistributedConfig(tp_size=...) does"
        )
    for name, ranks in (("context", trainer.get_cp_size()), ("sequence", trainer.get_sp_size())):
        if ranks > 1:
            raise ConfigError(
                f"{name}-parallel ranks must be 1 to train on packs, got {ranks}; Trainer splits batches along their "
                "tokens, which pixels lack; balanced_loader(mesh=...) deals packs to groups of ranks in other loops"
            )


def keeps_sft_loss(trainer: Any) -> bool:
    """Whether a trainer is TRL's SFTTrainer with its own loss, which divides by the target tokens of the step."""
    module = sys.modules.get("trl.trainer.sft_trainer")  # not imported for trainers of other kinds
    if module is None or not isinstance(trainer, module.SFTTrainer):
        return False
    methods = ("compute_loss", "training_step", "log")
    is_own = all(getattr(type(trainer), name) is getattr(module.SFTTrainer, name) for name in methods)
    # Older versions hand the loss to the model.
    return is_own and Version(version("trl")) >= Version(SFT_FLOOR)


def model_of(trainer: Any) -> Any:
    return trainer.accelerator.unwrap_model(trainer.model)


def sharding_of(trainer: Any) -> Sharding:
    if trainer.is_deepspeed_enabled:
        layouts: tuple[Sharding, ...] = ("ddp", "zero1", "zero2", "zero3")
        return layouts[int(trainer.accelerator.state.deepspeed_plugin.zero_stage)]
    return "fsdp" if trainer.is_fsdp_enabled or _of_mesh(trainer, "fsdp_size") > 1 else "ddp"


def _of_mesh(trainer: Any, name: str) -> int:
    """A size of the mesh that ``from_pretrained(distributed_config=...)`` has laid the model on."""
    config = getattr(getattr(trainer.model, "config", None), "distributed_config", None)
    return int(getattr(config, name, None) or 1)


def data_rank_of(trainer: Any) -> tuple[int, int]:
    """This process's data-parallel rank, and how many there are: ranks that share each tensor get the same packs."""
    sharing = trainer.get_tp_size()  # the innermost dimension of the device mesh
    return trainer.args.process_index // sharing, trainer.args.world_size // sharing


def data_seed(trainer: Any) -> int:
    args = trainer.args
    return int(args.seed if args.data_seed is None else args.data_seed)


def batch_size_of(trainer: Any, num_replicas: int) -> int:
    """Samples of a micro-batch of one rank, as the settings ask for."""
    size: int = trainer.args.per_device_train_batch_size
    if not trainer.accelerator.split_batches:
        return size
    if size % num_replicas:
        raise ConfigError(
            f"per_device_train_batch_size must be a multiple of the {num_replicas} data-parallel ranks with "
            f"split_batches=True, got {size}"
        )
    return size // num_replicas


def asked_steps(
    trainer: Any,
    num_replicas: int,
    samples_per_step: int | None = None,
    limits: PackLimits | None = None,
    *,
    on_targets: bool = False,
) -> AskedSteps:
    """What the settings ask of a run, or ``samples_per_step`` of all ranks together."""
    args, batch_size = trainer.args, batch_size_of(trainer, num_replicas)
    asked = batch_size * num_replicas * args.gradient_accumulation_steps
    if samples_per_step is not None:
        asked = integer("samples_per_step", samples_per_step, num_replicas)
    # Batches of the samples asked for are what packs are compared with.
    batches = max(round(asked / batch_size / num_replicas), 1)
    masks = _masks_padding(model_of(trainer))
    return AskedSteps(asked, batch_size, batches, args.num_train_epochs, args.max_steps, limits, masks, on_targets)


def _masks_padding(model: Any) -> bool:
    """Whether attention to padded rows is under a dense mask: flash and flex attention need none."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    name = str(getattr(text, "_attn_implementation", ""))
    return not any(kind in name for kind in ("flash", "flex"))


def set_micro_batches(trainer: Any, micro_batches: int) -> None:
    """Let an optimizer step have as many micro-batches of each rank; the arguments that the user holds stay."""
    found = trainer.args.gradient_accumulation_steps
    if micro_batches == found:
        return
    own = Version(getattr(sys.modules.get("transformers"), "__version__", COUNTED_BY_ACCELERATE))
    if own < Version(COUNTED_BY_ACCELERATE) and trainer.accelerator.gradient_accumulation_steps == found:
        trainer.accelerator.gradient_accumulation_steps = micro_batches
    trainer.args = copy(trainer.args)
    trainer.args.gradient_accumulation_steps = micro_batches
    if trainer.is_deepspeed_enabled:  # DeepSpeed has a count of its own, and checks that its batch sizes agree
        config = trainer.accelerator.state.deepspeed_plugin.deepspeed_config
        config["gradient_accumulation_steps"] = micro_batches
        config.pop("train_batch_size", None)


def recompute_of(trainer: Any) -> Level:
    by_model = trainer.args.gradient_checkpointing or getattr(model_of(trainer), "is_activation_checkpointing", False)
    return "full" if by_model or wraps_layers(trainer) else "none"


def wraps_layers(trainer: Any) -> bool:
    """Whether FSDP's own wrappers recompute layers."""
    return bool(trainer.is_fsdp_enabled and trainer.accelerator.state.fsdp_plugin.activation_checkpointing)


def why_all_rows(trainer: Any, head: Head = "targets") -> str | None:
    """Why the head of the trainer's model works on all rows under ``StepLoss``; None if on target rows alone."""
    # A compiled graph cannot hold gradients that are made in a forward pass; a tensor-parallel rank has a part of the
    # words and knows no loss; of models outside of FAMILIES nobody has shown that the loss gets what the head gives;
    # Gemma 4 bounds it before. Liger's fused loss gets no labels, as Trainer keeps them for the loss of packs.
    config = model_of(trainer).config
    reasons = {
        "head='all'": head == "all",
        "SFTTrainer keeps its own loss": keeps_sft_loss(trainer),
        "torch_compile": trainer.args.torch_compile,
        "tensor-parallel ranks": trainer.get_tp_size() > 1,
        f"not tried with {config.model_type}": config.model_type not in FAMILIES,
        "final_logit_softcapping": getattr(config.get_text_config(), "final_logit_softcapping", None) is not None,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


class TrainerSettings(NamedTuple):
    """What a trainer's arguments and model say of its ranks and steps, read once."""

    model: Any
    sharding: Sharding
    rank: int
    num_replicas: int
    num_devices: int
    seed: int
    recompute: Level
    all_rows: str | None
    """Why the head works on all rows; None where it works on target rows alone."""
    keeps_sft_loss: bool
    is_ddp: bool
    all_gradients: bool
    """Whether the host cannot do without the ViT's gradients, even where no rank has an image."""
    held: HeldBytes
    device: Any  # torch's
    device_name: str
    """As torch calls a GPU; of a CPU its kind and threads."""
    counted: ModelProfile | None
    """What layers cost, counted for the device; None on all ranks where one cannot count."""

    @classmethod
    def of(cls, trainer: "Trainer", head: Head = "targets") -> "TrainerSettings":
        """The settings of a trainer that ``refuse_settings`` lets pass; all ranks together."""
        if head not in get_args(Head):
            raise ConfigError(f"head must be one of {', '.join(get_args(Head))}, got {head!r}")
        model, name, counted = model_of(trainer), device_name(trainer.args.device), None
        with reporting("counting of costs"):
            counted = counted_profile(model, name)
        sharding, is_deepspeed = sharding_of(trainer), trainer.is_deepspeed_enabled
        ddp = trainer.accelerator.ddp_handler
        # DDP waits for the gradients of all parameters, unless it looks for unused ones in every step: it does not
        # where the model, by itself or by the trainer's settings, computes activations again. DeepSpeed reduces
        # gradients bucket by bucket, and ZeRO 3 gathers weights in the order of the steps before.
        all_gradients = is_deepspeed or ddp.static_graph or not ddp.find_unused_parameters
        return cls(
            model,
            sharding,
            *data_rank_of(trainer),
            trainer.args.world_size,
            data_seed(trainer),
            recompute_of(trainer),
            why_all_rows(trainer, head),
            keeps_sft_loss(trainer),
            is_ddp=sharding == "ddp" and not is_deepspeed,
            all_gradients=bool(all_gradients),
            held=HeldBytes.of(trainer, model, sharding),
            device=trainer.args.device,
            device_name=name,
            counted=counted if all(gather(counted is not None)) else None,
        )

    @property
    def on_targets(self) -> bool:
        return self.all_rows is None

    def memory(self, memory_gib: float | None) -> RankMemory | None:
        """What ranks hold, where they have so much memory each: by default what is counted of their devices."""
        # All ranks together. None where memory is not asked: ``memory_gib`` is infinite, or by default on a CPU, for a
        # model whose layers are not counted, and where ranks share each tensor.
        profile = self.counted
        if memory_gib is None and profile is not None and self.num_replicas == self.num_devices:
            memory_gib = device_gib(self.device)
        if memory_gib is None or memory_gib == float("inf"):
            return None
        if profile is None:
            raise ConfigError(
                f"memory_gib must be None for a model whose layers are not counted, got {memory_gib} for "
                f"{type(self.model).__name__}; say how much a pack may hold: balance(trainer, PackLimits(…))"
            )
        least = OVERHEAD_BYTES / GIB
        if not memory_gib > least:
            raise ConfigError(
                f"memory_gib must be more than the {least:.1f} GiB that a device holds beside the model, got "
                f"{memory_gib}"
            )
        cluster = Cluster(1, self.num_devices, Device.named(profile.device), memory_bytes=memory_gib * GIB)
        if self.held.dtype != profile.dtype:
            profile = counted_profile(self.model, profile.device, dtype=self.held.dtype) or profile
        precision, buffered = self.held.precision, self.held.buffer_bytes(profile)
        own = profile, self.sharding, cluster, self.recompute
        return RankMemory(*own, self.on_targets, self.held.offloaded, precision, buffered)

    def refuse_missing_kinds(self, lengths: SampleLengths) -> None:
        """Refuse data that bring a trained encoder nothing, where DDP waits for its gradients."""
        if not (self.is_ddp and self.num_replicas > 1 and self.all_gradients):
            return
        sees = bool(lengths.vision_units.any())
        hears = sees if lengths.sound_units is None else bool(lengths.sound_units.any())  # Qwen2-Audio: vision units
        brought = {"vision": sees, "projector": sees, "sound": hears, "language": True}
        trained = (name for name, weight in self.model.named_parameters() if weight.requires_grad)
        lacking = next((name for name in trained if not brought[module_of(name)]), None)
        if lacking is not None:
            raise ConfigError(
                f"what is trained must get gradients from the data, got none of {module_of(lacking)} for {lacking}; "
                "DDP fails in the second step: freeze it, or set ddp_find_unused_parameters=True"
            )
