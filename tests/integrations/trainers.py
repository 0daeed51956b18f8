"""transformers.Trainer on processes of a launch: small models under each way that its ranks share their work."""

import contextlib
import inspect
import math
import os
from dataclasses import dataclass, field

import deepspeed
import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from deepspeed.comm import comm
from peft import LoraConfig, get_peft_model
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.distributed import DistributedConfig
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from omnibal.data.limits import PackLimits
from omnibal.integrations.trainer.settings import data_rank_of
from tests.engine import launch
from tests.integrations.items import Collate, config_of, items_of, items_of_kinds
from tests.vlm.families import plain_family_model, shaken

LEARNING_RATE = 0.05
ON_CPU = os.environ.get("DS_ACCELERATOR", "cpu") == "cpu"  # which launches set
LIMITS = {
    "internvl": PackLimits(7, 60),
    "qwen2_vl": PackLimits(300, 90),
    "qwen2_5_vl": PackLimits(300, 90),
    "qwen3_vl": PackLimits(300, 90),
    "qwen3_vl_moe": PackLimits(300, 90),
    "qwen2_audio": PackLimits(3, 60),
    "qwen2_5_omni_thinker": PackLimits(80, 90, sound_units=60),
}
LAYERS = {"internvl": ["Qwen2DecoderLayer", "InternVLVisionLayer"], "qwen2_5_vl": ["Qwen2_5_VLDecoderLayer"]}
LAYERS["qwen2_vl"], LAYERS["qwen3_vl"] = ["Qwen2VLDecoderLayer"], ["Qwen3VLTextDecoderLayer"]
LAYERS["qwen2_audio"] = ["Qwen2DecoderLayer", "Qwen2AudioEncoderLayer"]
LAYERS["qwen2_5_omni_thinker"] = ["Qwen2_5OmniDecoderLayer", "Qwen2_5OmniAudioEncoderLayer"]


@dataclass(frozen=True)
class Case:
    """How a small model is trained: how ranks share it (``"ddp"``, ``"zero1"``, …, ``"fsdp"``, ``"tp"``), and more."""

    family: str
    layout: str = "ddp"
    frozen_vision: bool = False
    lora: bool = False
    samples: int | None = None
    kinds: tuple[str, ...] | None = None  # of samples with videos, as ``items_of_kinds`` has them
    loss_reduction: str = "token"
    router_factor: float = 0.0  # of the loss that a mixture of experts has beside that of the tokens
    padded: bool = False
    born_sharded: bool = False  # as from_pretrained makes a model under ZeRO 3
    recompute: object = "fill"  # of balance
    options: dict = field(default_factory=dict)
    zero: dict = field(default_factory=dict)  # more of the ds_config's zero_optimization
    optimizer: dict | None = None  # of the ds_config

    def arguments(self):
        """Of TrainingArguments."""
        if self.layout.startswith("zero"):
            config = zero_config(int(self.layout[-1]))
            config["zero_optimization"] |= self.zero
            if self.optimizer is not None:
                config["optimizer"] = self.optimizer
            return {"deepspeed": config} | self.options
        if self.layout == "fsdp":
            wrapped = {"transformer_layer_cls_to_wrap": LAYERS[self.family], "state_dict_type": "SHARDED_STATE_DICT"}
            return {"fsdp": True, "fsdp_config": wrapped} | self.options
        return self.options

    def plain(self):
        """The model as it is without any trainer."""
        unset_hf_deepspeed_config()
        return self.model()

    def model(self):
        """The same weights at each call."""
        config = config_of(self.family)
        if self.router_factor:
            text = {"output_router_logits": True, "router_aux_loss_coef": self.router_factor}
            vars(config.text_config).update(text)
        model = plain_family_model(config)
        if self.frozen_vision:
            for name, parameter in model.named_parameters():
                parameter.requires_grad_("vision_tower" not in name and "visual" not in name)
        if self.lora:
            model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_modules=["q_proj", "v_proj"]))
            adapters = torch.nn.ParameterList(p for name, p in model.named_parameters() if "lora" in name)
            for adapter in adapters:
                torch.nn.init.zeros_(adapter)
            shaken(adapters)
        return model


def zero_config(stage):
    return {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
    }


class Items(torch.utils.data.Dataset):
    """Notes what is read."""

    def __init__(self, family, samples=None, kinds=None):
        self.items, self.read = items_of(family)[:samples] if kinds is None else items_of_kinds(family, kinds), []

    def __len__(self):
        return len(self.items)

    def __getitem__(self, sample):
        self.read.append(sample)
        return self.items[sample]


def trainer_of(case, folder, *, eval_dataset=None, **options):
    """A trainer for a case, or for a family alone."""
    case = Case(case) if isinstance(case, str) else case
    for name in [name for name in os.environ if name.startswith(("ACCELERATE_", "FSDP_"))]:
        del os.environ[name]  # of the trainer before
    model = None if case.born_sharded else case.plain()
    arguments = TrainingArguments(
        str(folder),
        **{
            "use_cpu": ON_CPU,
            "report_to": [],
            "disable_tqdm": True,
            "remove_unused_columns": False,
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 2,
            "optim": "sgd",
            "learning_rate": LEARNING_RATE,
            "lr_scheduler_type": "constant",
            "max_grad_norm": 0,
            "save_strategy": "no",
            "logging_strategy": "no",
            **case.arguments(),
            **options,
        },
    )
    if case.layout in ("fsdp", "tp"):  # Accelerate shards on what it takes for GPUs only
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    model = case.model() if model is None else model
    if case.layout == "tp":
        saved = folder / "plain"
        model.save_pretrained(saved)  # by the first rank
        dist.barrier()
        shared = DistributedConfig(tp_size=2, fsdp_size=arguments.world_size // 2)
        model = type(model).from_pretrained(saved, distributed_config=shared, attn_implementation="sdpa")
    dataset = Items(case.family, case.samples, case.kinds)
    data = {"data_collator": Collate(case.family), "train_dataset": dataset, "eval_dataset": eval_dataset}
    return Trainer(model, arguments, **data)


def samples_under_limits(trainer):
    """Samples of a step whose packs, as many of each rank as the trainer accumulates, fill ``LIMITS``."""
    return math.ceil(1.375 * data_rank_of(trainer)[1] * trainer.args.gradient_accumulation_steps)


def steps_of_draws(trainer, steps):
    """The samples of the first steps of a trainer that rearranges, as its ranks draw them together."""
    args, count = trainer.args, len(trainer.train_dataset)
    size = args.per_device_train_batch_size * args.gradient_accumulation_steps * dist.get_world_size()
    found, epoch = [], 0
    while len(found) < steps:
        order = np.random.default_rng((args.seed, epoch)).permutation(count).tolist()
        found += [order[start : start + size] for start in range(0, count, size)]
        epoch += 1
    return found[:steps]


def weights_of(model):
    """All weights, whole, on every rank, on the CPU."""
    parameters = dict(model.named_parameters())
    sharded = [parameter for parameter in parameters.values() if hasattr(parameter, "ds_id")]
    with deepspeed.zero.GatheredParameters(sharded) if sharded else contextlib.nullcontext():
        return {
            name: (parameter.full_tensor() if isinstance(parameter, DTensor) else parameter).detach().cpu().clone()
            for name, parameter in parameters.items()
        }


class Weights(TrainerCallback):
    """Keeps the weights before every step, and behind the last one."""

    def __init__(self, trainer):
        self.trainer, self.steps = trainer, []

    def on_train_begin(self, *arguments, **others):
        self.steps.append(weights_of(self.trainer.model))

    def on_step_end(self, *arguments, **others):
        self.steps.append(weights_of(self.trainer.model))


def assert_close(found, expected, **tolerances):
    assert found.keys() == expected.keys()
    for name in found:
        most = {"rtol": 1e-4, "atol": 2e-6} | tolerances
        if not ON_CPU:  # which sums in another order
            most = {kind: 5 * tolerance for kind, tolerance in most.items()}
        torch.testing.assert_close(found[name], expected[name], **most, msg=lambda text, name=name: name + text)


def mean_losses(plain, items, family):
    """The mean loss of all target tokens of some samples, each run alone, and the mean of the samples' own means."""
    collate = Collate(family)
    with torch.no_grad():
        losses = [plain.eval()(**collate([item])).loss.item() for item in items]
    return np.average(losses, weights=[int((item["labels"][1:] != -100).sum()) for item in items]), np.mean(losses)


def check_evaluation(trainer, plain, items, family):
    """Two ranks evaluate a sample each at a time, of unlike kinds: the loss is Trainer's, or exact where it errs."""
    of_tokens, of_samples = mean_losses(plain, items, family)
    expected = of_tokens if trainer.model_accepts_loss_kwargs else of_samples
    assert trainer.evaluate(items)["eval_loss"] == pytest.approx(expected, rel=1e-4)


@contextlib.contextmanager
def accelerate_afresh():
    """Leaves the processes of a launch as they were: Accelerate's settings are global, and it gathers as it likes."""
    checked = {
        (module, name): function
        for module in (dist, distributed_c10d, comm.cdb)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__code__.co_filename == launch.__file__
    }
    environment = dict(os.environ)
    os.environ["LOCAL_WORLD_SIZE"] = os.environ["WORLD_SIZE"]
    try:
        for (module, name), function in checked.items():
            setattr(module, name, function.__wrapped__)
        yield
    finally:
        for (module, name), function in checked.items():
            setattr(module, name, function)
        launch.forget_trainers(environment)
