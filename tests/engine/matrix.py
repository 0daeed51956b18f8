"""The matrix: what a run is made of, which values cannot meet, and what the processes of its cases run."""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForImageTextToText

from omnibal.cluster import Encoder, Layout
from omnibal.config.section import LoraSection
from omnibal.families.base import encoder_layers
from omnibal.pipeline.schedule import SCHEDULES
from omnibal.vlm import load_model
from tests.engine import small
from tests.engine.cases import engine_of, weights_of
from tests.engine.covering import Design
from tests.integrations.items import items_of
from tests.vlm.families import SHAPES, TRAINED

STEPS, CLIPPING = 3, 0.05
# Adam divides by the size of a gradient: its usual epsilon would make full steps of a zero that rounding blurs.
ADAM = {"lr": 3e-3, "betas": (0.9, 0.99), "weight_decay": 0.01, "eps": 1e-3}
DROP_INS = ("packs", "rearranged")
NUM_DROP_IN_RANKS = 2
PIPELINE, REPLICAS, TENSOR = Layout(3, 1), Layout(1, 2), Layout(1, 1, num_tensor=2)
SPREAD, UNITS = Layout(2, 1, encoder=Encoder.on_all(2)), Layout(2, 2, encoder=Encoder(1, 1))
CROSSED = (PIPELINE, REPLICAS, TENSOR, SPREAD, UNITS)
STAGED_TENSOR = Layout(2, 1, num_tensor=2)
# Two of four tensor ranks hold the same heads of keys.
COMBINED = (Layout(2, 2), STAGED_TENSOR, Layout(1, 1, num_tensor=4), Layout(2, 1, encoder=Encoder(1, 2)))
LAYOUTS = {
    str(layout): layout
    for layout in (
        *(*CROSSED, *COMBINED, Layout(1, 1), Layout(2, 1), Layout(4, 1), Layout(3, 2)),
        *(Layout(1, 2, num_tensor=2), Layout(1, 2, encoder=Encoder.on_all(2)), Layout(2, 2, encoder=Encoder.on_all(4))),
        Layout(2, 2, num_tensor=2),
        *(
            Layout(2, 1, encoder=Encoder(1, 3)),
            Layout(3, 2, encoder=Encoder(1, 1)),
            Layout(3, 1, encoder=Encoder(1, 2)),
        ),
    )
}
BFLOAT16 = {"bf16": {"enabled": True}}
DTYPES = {
    "float32": {},
    "bfloat16": BFLOAT16 | {"data_types": {"grad_accum_dtype": "fp32"}},
    "bfloat16 sums": BFLOAT16 | {"data_types": {"grad_accum_dtype": "bf16"}},
}
RECOMPUTES = {name: (name,) for name in ("none", "full", "selective")} | {"mixed": ("full", "none", "selective")}
# Of each way to train a part of the model what is frozen, and the adapters.
PARTS = {
    "all": ((), None),
    "LLM": (("vision", "projector"), None),
    "encoder": (("language",), None),
    "some weights": (("decoder_block", "*.bias"), None),
    "projector and LLM": (("vision",), None),
    "projector": (("vision", "language"), None),
    "adapters": ((), {"rank": 2, "targets": ["language", "vision"], "modules_to_save": ["projector"]}),
    "adapters of the LLM": (("vision",), {"rank": 3}),
}
ENCODING = tuple(
    name for name in PARTS if name not in ("LLM", "adapters of the LLM")
)  # those with encoder or projector
DATA = ("images", "a step of texts", "texts")
TEXTS = [number for number, (sizes, _) in enumerate(SHAPES) if not sizes]

STAGED = tuple(name for name, layout in LAYOUTS.items() if layout.num_stages > 1)
ALL_SPREAD = tuple(name for name, layout in LAYOUTS.items() if layout.is_spread)
OTHER_SCHEDULES = tuple(name for name in SCHEDULES if name != "1f1b")
JOINED_TILES = ("llava_next", "llava_onevision")
# What a drop-in has no setting for, and what is refused.
RULES = (
    {"layout": DROP_INS, "schedule": OTHER_SCHEDULES},
    {"layout": DROP_INS, "data": ("a step of texts",)},
    {"layout": DROP_INS, "recompute": ("selective", "mixed")},
    {"layout": DROP_INS, "dtype": ("bfloat16 sums",)},
    {"layout": ("packs",), "zero": (0,), "recompute": ("full",), "data": ("texts",), "trained": ENCODING},
    {"layout": tuple(LAYOUTS), "zero": (2, 3)},
    {"layout": STAGED, "zero": (0,), "dtype": ("float32",), "clips": (True,)},
    {"layout": tuple(LAYOUTS), "zero": (0,), "dtype": ("bfloat16",)},
    {"layout": ALL_SPREAD, "family": JOINED_TILES},
)
FACTORS = {
    "layout": (*LAYOUTS, *DROP_INS),
    "family": TRAINED,
    "zero": (0, 1, 2, 3),
    "dtype": tuple(DTYPES),
    "trained": tuple(PARTS),
    "recompute": tuple(RECOMPUTES),
    "clips": (False, True),
    "schedule": tuple(SCHEDULES),
    "tied": (False, True),
    "data": DATA,
}
ALL = Design(FACTORS, RULES)
# What tests have time for on each change; tests/integrations has the drop-ins, test_lora the adapters.
COMBINED_NAMES, SOME = tuple(map(str, COMBINED)), ("some weights",)
FEW = Design(
    FACTORS
    | {
        "layout": (*map(str, CROSSED), *COMBINED_NAMES),
        "zero": (0, 1),
        "trained": ("all", "LLM", "encoder", *SOME),
        "recompute": ("none", "full", "mixed"),
    },
    RULES,
    once={"layout": COMBINED_NAMES, "family": TRAINED, "trained": SOME},
    # Features of Qwen3-VL's ViT that decoder blocks read cross every border; images of any size, those between ranks.
    # A frozen stage has no gradient that its second tensor rank counts.
    also=(
        {"layout": str(STAGED_TENSOR), "zero": 0, "dtype": "bfloat16 sums", "trained": "encoder"},
        *({"layout": str(layout), "family": "qwen3_vl"} for layout in (PIPELINE, TENSOR, UNITS)),
        *({"layout": str(layout), "family": "qwen2_5_vl"} for layout in (TENSOR, SPREAD)),
    ),
)


@dataclass(frozen=True)
class Cell:
    """A combination of values, and the seed of what is drawn beside them: cuts, packs, micro-batches, budgets."""

    layout: str
    family: str
    zero: int
    dtype: str
    trained: str
    recompute: str
    clips: bool
    schedule: str
    tied: bool
    data: str
    seed: int
    folder: str = ""

    @property
    def num_processes(self):
        return NUM_DROP_IN_RANKS if self.layout in DROP_INS else LAYOUTS[self.layout].num_devices

    @property
    def frozen(self):
        return PARTS[self.trained][0]

    @property
    def lora(self):
        return PARTS[self.trained][1]

    @property
    def clipping(self):
        return CLIPPING if self.clips else 0.0

    @property
    def torch_dtype(self):
        return torch.float32 if self.dtype == "float32" else torch.bfloat16

    def plain_model(self):
        """Plain transformers' model, in float32, and ours; what the cell freezes is frozen, adapters are peft's."""
        return trained_part(self.folder, self.frozen, self.lora, self.torch_dtype)

    def case(self):
        """The cell as the engine's tests have cases."""
        random, layout = Random(self.seed), LAYOUTS[self.layout]
        micro_batches = random.choice((2, 3, 4)) if layout.num_replicas == 1 else random.choice((1, 2, 3))
        if layout.has_units:  # encoders take the packs of a step in turns
            micro_batches += -micro_batches % layout.encoder.num_replicas
        kinds = {"images": [False] * STEPS, "texts": [True] * STEPS, "a step of texts": [False, True, False]}
        packs, *later = [
            random_packs(random, layout.num_replicas, micro_batches, texts_only=texts) for texts in kinds[self.data]
        ]
        return small.Case(
            random_cut(random, layout, load_model(self.folder).records, tied=self.tied),
            packs,
            self.folder,
            RECOMPUTES[self.recompute],
            self.zero,
            STEPS,
            {"optimizer": {"type": "AdamW", "params": ADAM | {"torch_adam": True}}, **DTYPES[self.dtype]}
            | {"gradient_clipping": self.clipping},
            self.schedule,
            self.frozen,
            self.lora,
            pending_bytes=random.choice((None, 0, 3000, 30_000)),
            encoder=layout.encoder,
            num_tensor=layout.num_tensor,
            later_packs=later,
        )


def random_cut(random, layout, records, *, tied):
    """Boundaries of stages: with a spread encoder the first stage ends in the LLM, with units what is tied meets."""
    first, last, count = 1, len(records), layout.num_stages - 1
    if layout.is_spread:
        first = encoder_layers(records) + 1
    cuts = sorted(random.sample(range(first, last), count))
    if layout.has_units and tied:
        cuts = sorted(random.sample(range(1, encoder_layers(records) + 1), count))
    return (0, *cuts, last)


def random_packs(random, num_replicas, micro_batches, *, texts_only):
    """All samples on packs, some of which stay empty; only some replicas get pictures."""
    packs = [[[] for _ in range(micro_batches)] for _ in range(num_replicas)]
    with_pictures = random.sample(packs, random.randint(1, num_replicas))
    for sample in TEXTS if texts_only else range(len(SHAPES)):
        random.choice(random.choice(packs if sample in TEXTS else with_pictures)).append(sample)
    return packs


def trained_part(folder, frozen, lora, dtype):
    """Plain transformers' model in float32 with weights that a dtype holds, and ours."""
    vlm = load_model(folder, None if lora is None else LoraSection(**lora), frozen)
    plain = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    for parameter in plain.parameters():
        parameter.data = parameter.data.to(dtype).float()
    if lora is not None:
        from tests.vlm.lora import adapted_model  # imports peft, which ranks under the engine do without

        return adapted_model(plain, vlm, dtype), vlm
    frozen_names = {
        name
        for index, record in enumerate(vlm.records)
        for name in vlm.weight_names(index).values()
        if record.freezes(name, frozen)
    }
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(vlm.disk_name(name) not in frozen_names)
    return plain, vlm


def train(cell, folder):
    """What a cell gives on this rank."""
    if cell.layout in DROP_INS:
        from tests.engine.matrix_drop_ins import train_drop_in  # imports transformers' Trainer, which takes seconds

        return train_drop_in(cell, Path(folder))
    return train_engine(cell.case())


def train_engine(case):
    """Losses, the first step's gradients, norms (None where the optimizer finds none), final weights."""
    gradients, losses, norms = {}, [], []
    own = {"on_gradient": lambda name, gradient: losses or gradients.update({name: gradient.clone()})}
    engine = engine_of(replace(case, own=own))
    for _ in range(case.steps):
        losses.append(engine.train_batch().item())
        norm = engine.get_global_grad_norm()
        norms.append(None if norm is None else float(norm))
    found = {"losses": losses, "norms": norms, "gradients": gradients, "weights": weights_of(engine)}
    return found | {"skipped": engine.skipped_steps, "tensor": engine.module.ranks.rank}


def drop_in_items(family, data):
    items = items_of(family)
    return [item for item in items if item.get("pixel_values") is None] if data == "texts" else items
