"""A small InternVL, samples for it, and what plain transformers makes of them."""

from dataclasses import dataclass, field

import torch
from transformers import InternVLForConditionalGeneration, Qwen2Config

from omnibal.cluster import Encoder
from omnibal.vlm import load_model
from tests.families.models import small_config as family_config

IMAGE_TOKEN, TOKENS_PER_TILE, TILE, VOCABULARY = 3, 4, 28, 61
PIXEL_SHAPE = (3, TILE, TILE)
NUM_LAYERS = 10
# Tiles of the images of each sample, and text tokens around them.
SHAPES = [((1,), 7), ((), 5), ((2, 1), 9), ((3,), 4), ((), 12), ((1, 1), 6), ((1,), 3), ((), 2)]


@dataclass
class Case:
    """One training step: the cut, the packs of every replica (lists of sample indices), and the settings."""

    boundaries: tuple
    packs: list  # [replica][micro_batch] -> samples
    model: str = ""
    recompute: tuple = ("none",)  # repeated over the layers
    zero_stage: int = 0
    steps: int = 1
    extra: dict = field(default_factory=dict)
    schedule: str = "1f1b"
    frozen: tuple = ()  # modules, kinds of layers, patterns of weights' names
    lora: dict | None = None  # "omnibal.model.lora"
    pending_bytes: int | None = None  # what the plan says each stage's weight gradients may keep
    own: dict = field(default_factory=dict)  # arguments of UserOptimizer
    grouped: dict = field(default_factory=dict)  # "omnibal.optimizer"
    deep: bool = False  # a feature of the ViT goes to a decoder block
    encoder: Encoder | None = None  # replicas of its own; packs are those of the LLM's replicas
    num_tensor: int = 1  # ranks that share each layer
    later_packs: list = field(default_factory=list)  # packs of the steps behind the first one; then all come again
    kinds: tuple = ()  # of samples with videos, as ``items_of_kinds`` has them


def small_config(*, tied=False, dropout=0.0, text_class=Qwen2Config, text=None, **vision):
    vision = {
        "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "image_size": TILE, "patch_size": 7,
        "initializer_range": 0.2, "layer_scale_init_value": 0.7,
        "hidden_dropout_prob": dropout, "attention_dropout": dropout,
    } | vision  # fmt: skip
    text = {
        "model_type": text_class.model_type, "vocab_size": VOCABULARY, "num_hidden_layers": 2,
        "max_position_embeddings": 256, "initializer_range": 0.2,
        "tie_word_embeddings": tied, "attention_dropout": dropout,
    } | (text or {})  # fmt: skip
    options = {"image_seq_length": TOKENS_PER_TILE, "downsample_ratio": 0.5, "tie_word_embeddings": tied}
    return family_config("internvl", image_token_id=IMAGE_TOKEN, vision=vision, text=text, **options)


def small_samples(shapes=SHAPES):
    """Samples with one to three images or none; about a third of the text tokens carry loss."""
    generator = torch.Generator().manual_seed(5)
    return [_sample(tiles, tokens, generator) for tiles, tokens in shapes]


def _sample(tiles, tokens, generator):
    parts, labels = [], []
    for count in tiles:
        image = torch.full((count * TOKENS_PER_TILE,), IMAGE_TOKEN)
        parts.append(image)
        labels.append(torch.full_like(image, -100))
    text = torch.randint(4, VOCABULARY, (tokens,), generator=generator)
    parts.append(text)
    labels.append(torch.where(torch.arange(tokens) >= tokens // 2, text, -100))
    pixels = torch.randn(sum(tiles), *PIXEL_SHAPE, generator=generator) if tiles else None
    return {"input_ids": torch.cat(parts), "labels": torch.cat(labels), "pixel_values": pixels}


def save_small_model(folder, *, seed=1, **options):
    """Write a Hugging Face folder with weights."""
    torch.manual_seed(seed)
    model = InternVLForConditionalGeneration(small_config(**options))
    for parameter in model.parameters():
        parameter.data.add_(0.02 * torch.randn_like(parameter))  # no weight is zero, so every gradient counts
    model.save_pretrained(folder)


def plain_gradients(folder, samples):
    """Loss and gradients of plain transformers: samples one by one, unpadded, averaged over all target tokens."""
    model = InternVLForConditionalGeneration.from_pretrained(folder, attn_implementation="sdpa")
    loss = backward_one_by_one(model, samples)
    return loss, _by_disk_name(folder, model, lambda parameter: parameter.grad)


def plain_training(
    folder,
    samples,
    *,
    make_optimizer,
    make_scheduler,
    clipping,
    steps,
    frozen=(),
    dtype=torch.float32,
    grouped=lambda parameters: parameters.values(),
):
    """Losses, gradient norms and final weights of a plain training loop that sees all samples in every step.

    It computes in float32; ``dtype`` is that of the weights it begins with. ``grouped`` makes of the parameters, by
    their names on disk, what the optimizer is made from.
    """
    model = InternVLForConditionalGeneration.from_pretrained(folder, attn_implementation="sdpa", dtype=dtype).float()
    not_trained = names_of(folder, frozen)
    parameters = _by_disk_name(folder, model, lambda parameter: parameter)
    for name, parameter in parameters.items():
        parameter.requires_grad_(name not in not_trained)
    optimizer = make_optimizer(grouped(parameters))
    scheduler = make_scheduler(optimizer)
    losses, norms = [], []
    for _ in range(steps):
        losses.append(backward_one_by_one(model, samples))
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clipping).item())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return losses, norms, _by_disk_name(folder, model, torch.Tensor.detach)


def names_of(folder, frozen):
    """Names on disk of the weights that are not trained."""
    layers = load_model(folder)
    named = [(record, layers.weight_names(index).values()) for index, record in enumerate(layers.records)]
    return {name for record, names in named for name in names if record.freezes(name, frozen)}


def backward_one_by_one(model, samples):
    """Adds every sample's gradient of the loss averaged over all target tokens; returns that loss."""
    targets = sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
    total = 0.0
    for sample in samples:
        logits = model(input_ids=sample["input_ids"][None], pixel_values=sample["pixel_values"]).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], sample["labels"][1:], reduction="sum") / targets
        if loss.requires_grad:  # not of a text where only parts of the vision tower are trained
            loss.backward()
        total += loss.item()
    return total


@torch.no_grad()
def plain_results(model, samples):
    """Mean loss of a target token, and share of samples answered exactly."""
    losses, exact = [], []
    for sample in samples:
        logits = model(input_ids=sample["input_ids"][None], pixel_values=sample["pixel_values"]).logits[0]
        has_target = sample["labels"][1:] != -100
        predicting, targets = logits[:-1][has_target], sample["labels"][1:][has_target]
        losses.append(torch.nn.functional.cross_entropy(predicting, targets, reduction="none"))
        exact.append(bool((predicting.argmax(-1) == targets).all()))
    return torch.cat(losses).mean().item(), sum(exact) / len(exact)


def _by_disk_name(folder, model, value_of):
    """Each parameter's value under the names that the parameters have on disk, as the layers' own table gives them."""
    layers = load_model(folder)
    values = {name: value_of(parameter) for name, parameter in model.named_parameters()}
    found = {}
    for index in range(len(layers.records)):
        for disk_name in layers.weight_names(index).values():
            for prefix in ("model.vision_tower", "model.multi_modal_projector", "model.language_model", "lm_head"):
                on_disk = {"model.language_model": "language_model.model", "lm_head": "language_model.lm_head"}
                disk_prefix = on_disk.get(prefix, prefix.removeprefix("model."))
                name = prefix + disk_name.removeprefix(disk_prefix)
                if disk_name.startswith(disk_prefix + ".") and name in values:
                    found[disk_name] = values[name]
    assert len(found) == len(values)
    return found
