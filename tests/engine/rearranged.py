"""What the processes of a test run: a spread encoder beside a model of transformers with samples rearranged."""

import torch
import torch.distributed as dist
from transformers import AutoModelForImageTextToText

from omnibal.integrations.rearranging import RearrangedModel
from omnibal.integrations.rearranging_loader import RearrangingLoader
from omnibal.packs.collator import PackCollator, positions_of
from omnibal.packs.encoders import encoders_of
from omnibal.vlm import load_model
from tests.engine.cases import one_step
from tests.integrations.items import Collate
from tests.vlm.families import family_samples


def spread_and_rearranged(case, family):
    """Loss and gradients of a case's first step, and of the same packs under `RearrangedModel`, by names on disk."""
    (spread,), samples = one_step([case]), family_samples(family)
    model = AutoModelForImageTextToText.from_pretrained(case.model, attn_implementation="sdpa", dtype=torch.float32)
    batches = [[samples[index] for index in pack] for pack in case.packs[dist.get_rank()]]
    collator = PackCollator(Collate(family), positions_of(model.config))
    encoders = encoders_of(model)
    loader = RearrangingLoader(batches, collator, encoders=encoders, prints=False, micro_batches=len(batches))
    rearranged = RearrangedModel(model)
    loss = sum(rearranged(drawn) for drawn in loader)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    for value in (loss := loss.detach(), *found.values()):
        dist.all_reduce(value)
        value.div_(dist.get_world_size())
    named = load_model(case.model)
    return spread, {
        "loss": loss.item(),
        "gradients": {named.disk_name(name): gradient for name, gradient in found.items()},
    }
