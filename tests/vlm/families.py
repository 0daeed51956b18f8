"""Small models and samples of every family that can be trained, and plain transformers as the oracle for both."""

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from omnibal.families import FAMILIES, family_of
from omnibal.formats.collate import pack_samples
from omnibal.vlm import load_model
from omnibal.vlm.weights import load_layer
from tests.families.models import image_processor, small_config
from tests.integrations.sounds import SOUND_MODELS

TRAINED = tuple(model_type for model_type, family in FAMILIES.items() if family.layers)
IMAGE_TOKEN, VIDEO_TOKEN = 600, 601
# Of each sample the (width, height) of its images, and its words.
SHAPES = [
    ([(40, 23)], 7),
    ([], 5),
    ([(13, 37), (60, 61), (9, 50)], 9),
    ([(64, 15)], 4),
    ([], 12),
    ([(12, 12), (70, 11)], 6),
    ([(67, 71)], 5),
]


def tied_config(model_type, **options):
    """The configuration of a small model, its embedding the head's."""
    return small_config(model_type, text_tied=True, tie_word_embeddings=True, **options)


def family_samples(model_type, shapes=SHAPES):
    """Samples with several images of unequal sizes, one or none; every second half of a text is to be learned."""
    config = small_config(model_type)
    processor, generator = image_processor(model_type), np.random.default_rng(3)
    options, rule = family_of(config.to_dict()).images(config.to_dict(), processor.to_dict())
    return [_sample(sizes, words, rule, processor, options, generator) for sizes, words in shapes]


def _sample(sizes, words, rule, processor, options, generator):
    text = generator.integers(4, IMAGE_TOKEN, words).tolist()
    ids, loads = text[:1], rule(sizes)
    for load in loads:
        ids += [IMAGE_TOKEN] * load.llm_tokens + text[1:2]
    ids += text[1:]
    labels = [-100] * (len(ids) - words // 2) + ids[len(ids) - words // 2 :]
    pixels = _pixels(sizes, loads, processor, options, generator) if sizes else {"pixel_values": None}
    return {"input_ids": torch.tensor(ids), "labels": torch.tensor(labels), **pixels}


def _pixels(sizes, loads, processor, options, generator):
    images = [Image.fromarray(generator.integers(0, 256, (h, w, 3), dtype=np.uint8)) for w, h in sizes]
    processed = processor([images], return_tensors="pt", **options)
    found = {name: processed[name] for name in processor.model_input_names if name in processed}
    if found["pixel_values"].dim() == 5:  # padded to as many tiles
        tiles = zip(found["pixel_values"], loads, strict=True)
        found["pixel_values"] = torch.cat([padded[: load.vision_units] for padded, load in tiles])
    return found


def pack_of(model, samples):
    """What the engine's loader makes of samples."""
    return pack_samples(
        samples,
        pad_token_id=0,
        pixel_shape=model.pixel_shape,
        image_integers=model.image_integers,
        positions=model.positions,
    )


def shaken(module, seed=0):
    """The module with weights that are all far from zero, or gradients behind them would hardly count."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return module


def plain_family_model(config):
    """Plain transformers, with shaken weights."""
    torch.manual_seed(1)
    model_class = SOUND_MODELS.get(config.model_type, AutoModelForImageTextToText)
    make = getattr(model_class, "from_config", None) or model_class._from_config
    plain = shaken(make(config, attn_implementation="sdpa"))
    plain.tie_weights()
    return plain


def plain_inputs(sample):
    """A sample as the Hugging Face model takes it."""
    images = {name: value for name, value in sample.items() if name not in ("input_ids", "labels")}
    ids = sample["input_ids"][None]
    if {"image_grid_thw", "video_grid_thw"} & images.keys() and "attention_mask" not in images:
        images["mm_token_type_ids"] = (ids == IMAGE_TOKEN).long() + 2 * (ids == VIDEO_TOKEN).long()
    return {"input_ids": ids, "use_cache": False} | images


def plain_backward(plain, samples):
    """Loss of a target token, with its gradients: samples one by one, unpadded. And the logits of each."""
    targets = sum(int((sample["labels"][1:] != -100).sum()) for sample in samples)
    total, all_logits = 0.0, []
    for sample in samples:
        logits = plain(**plain_inputs(sample)).logits[0]
        loss = torch.nn.functional.cross_entropy(logits[:-1], sample["labels"][1:], reduction="sum") / targets
        if loss.requires_grad:
            loss.backward()
        total += loss.item()
        all_logits.append(logits.detach())
    return total, all_logits


def named_on_disk(model, plain):
    """The plain model's parameters that are trained, by their names on disk."""
    named = {model.disk_name(name): parameter for name, parameter in plain.named_parameters()}
    return {name: parameter for name, parameter in named.items() if name not in model.spare_names}


def plain_steps(folder, samples_of_steps, *, clipping, frozen=(), **adam):
    """Losses, norms and final weights of a plain loop; gradients of parameters that no sample reaches are zeros."""
    model = load_model(folder)
    plain = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32)
    kinds = {name: r.kind for i, r in enumerate(model.records) for name in model.weight_names(i).values()}
    parameters = named_on_disk(model, plain)
    for name, parameter in parameters.items():
        parameter.requires_grad_(kinds[name] not in frozen)
    optimizer = torch.optim.AdamW([p for p in parameters.values() if p.requires_grad], **adam)
    losses, norms = [], []
    for samples in samples_of_steps:
        losses.append(plain_backward(plain, samples)[0])
        for parameter in parameters.values():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), clipping).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: parameter.detach() for name, parameter in parameters.items()}


def layers_of(model, source):
    """All layers, tied ones being one module, with the weights of a folder or model."""
    layers = []
    for index in range(len(model.records)):
        first = model.first_tied(index)
        if first < index:
            layers.append(layers[first])
            continue
        layers.append(model.build_layer(index, seed=None))
        load_layer(model, index, layers[index], source)
    return layers
