"""From a ds_config and streams to a rank's loader: settings that suit streams, samples that suit the model."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from omnibal.cluster import PipelinePosition
from omnibal.config import OmnibalSection
from omnibal.data.mixture import Mixture
from omnibal.engine.contract import SampleRules
from omnibal.engine.loader import PAD_TOKEN_ID, PackLoader, cores_of_process
from omnibal.engine.resolve import ResolvedRun, named, resolve_plan
from omnibal.engine.streams import StreamLoader
from omnibal.errors import ConfigError, DataError
from omnibal.feeds.draws import Sample
from omnibal.formats.collate import IGNORED, pack_samples
from omnibal.formats.streamed import ConversationStream, open_streams
from omnibal.plan import Plan


def is_stream(dataset: Any) -> bool:
    """Whether samples are drawn one by one, from one source or several by name: their lengths are not known."""
    return not hasattr(dataset, "lengths")


def open_annotations(section: OmnibalSection) -> dict[str, ConversationStream]:
    """The section's ``data.train`` as streams, by their names.

    Raises:
        ConfigError: It or ``model.path`` (for tokenizer and preprocessor) is not named.
        DataError: A file it names cannot be read as a stream.
    """
    return open_streams(
        named(None, section.data.train, "dataset", "omnibal.data.train"),
        named(None, section.model.path, "tokenizer and preprocessor", "omnibal.model.path"),
        image_folder=section.data.images,
        max_tiles=section.data.max_tiles,
        max_image_pixels=section.data.max_image_pixels,
        broken=section.data.broken,
        workers=cores_of_process() - 1 if section.data.workers is None else section.data.workers,
    )


def stream_loader(
    resolved: ResolvedRun, sources: Any, place: PipelinePosition, make_loader: partial[PackLoader]
) -> tuple[Plan, StreamLoader]:
    """The plan of a run on streams, and this rank's packs.

    Args:
        resolved: What is trained, and how.
        sources: As ``initialize`` takes a stream.
        place: Where this rank stands.
        make_loader: Makes a loader of held-out samples for this rank, from them and a sampler.

    Raises:
        ConfigError: The section does not say what a stream needs, or asks for what it cannot have.
    """
    section, rules = resolved.section, SampleRules.of(resolved.vlm)
    num_steps, mixture = _checked(section)
    plan = resolve_plan(resolved, None)
    loader = StreamLoader(
        sources if isinstance(sources, Mapping) else {"data": sources},
        mixture,
        plan.limits,
        layout=resolved.layout,
        place=place,
        micro_batches=plan.micro_batches,
        num_steps=num_steps,
        seed=section.packing.seed,
        oversized=section.packing.oversized,
        read=partial(checked_sample, rules=rules, dtype=resolved.dtype),
        collate=partial(
            pack_samples,
            pad_token_id=PAD_TOKEN_ID,
            pixel_shape=rules.pixel_shape,
            pixel_dtype=resolved.dtype,
            image_integers=rules.image_integers,
            positions=rules.positions,
        ),
        make_loader=make_loader,
        pin_memory=make_loader.keywords["pin_memory"],
    )
    return plan, loader


def _checked(section: OmnibalSection) -> tuple[int, Mixture | None]:
    """The run's steps and its mixture, where the section can be that of a run on streams."""
    mixture, packing, steps = section.data.mixture, section.packing, section.run.max_steps
    if steps is None:
        raise ConfigError(
            "omnibal.run.max_steps must say how long to train on a stream, got none; without lengths() it has no epochs"
        )
    if mixture == "repeat_time":
        raise ConfigError("omnibal.data.mixture must be shares by source for streams, got 'repeat_time'")
    if packing.method != "balanced":
        raise ConfigError(f"omnibal.packing.method must be 'balanced' for a stream, got {packing.method!r}")
    return steps, mixture


def checked_sample(item: Any, rules: SampleRules, dtype: torch.dtype) -> Sample:
    """A sample as the buffer holds it: pixels in the dtype that the model computes in.

    Args:
        item: What a source yields.
        rules: What the model asks of it.
        dtype: Of the model.

    Raises:
        DataError: It breaks a rule.
    """
    fields = item if isinstance(item, Mapping) else {}
    tiles, tokens = _entries(fields.get("pixel_values")), _entries(fields.get("input_ids"))
    problem = rules.problem(item, tiles=tiles, tokens=tokens, decoded=True)
    if problem is not None:
        raise DataError(f"a sample must {problem}")
    held = {name: item[name] for name in ("input_ids", "labels", *rules.image_integers) if item.get(name) is not None}
    held["pixel_values"] = item["pixel_values"].to(dtype) if tiles else None
    return Sample(held, (tiles, tokens, int((item["labels"][1:] != IGNORED).sum())))


def _entries(value: Any) -> int:
    return len(value) if isinstance(value, Tensor) and value.dim() else 0
