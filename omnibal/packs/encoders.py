"""What the encoders of a model take and give: of transformers' models, and of any model by ``EncoderAdapter``."""

from collections.abc import Mapping, Sequence
from functools import partial
from inspect import Parameter, signature
from math import prod
from typing import Any, Final, Literal, Protocol, cast

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_outputs import BaseModelOutputWithPooling
from transformers.models.qwen3_vl.modeling_qwen3_vl import BaseModelOutputWithDeepstackFeatures

from omnibal.errors import ConfigError
from omnibal.families import FAMILIES
from omnibal.formats.collate import GRIDS, IGNORED
from omnibal.packs.apart import plain_words
from omnibal.packs.collator import (
    LEAST_FRAMES,
    PER_IMAGE,
    PER_SOUND,
    PER_VIDEO,
    arguments_of,
    as_one_row,
    language_of,
    positions_of,
    sounds_of,
    videos_of,
    without_adapters,
)

IMAGE: Final = tuple(name for name in PER_IMAGE if name not in (*PER_VIDEO, *PER_SOUND))
VIDEO: Final = ("pixel_values_videos", "video_grid_thw")
"""What encoders take of videos; their seconds matter to positions alone."""


class EncoderAdapter(Protocol):
    """One kind of input of a model: what it takes of a sample, what it costs, what it gives, and where that goes.

    ``encoders_of`` makes encoders of transformers' models that take ``mm_encoder_outputs``, and of Qwen2-Audio. For
    another model, write a class with these members for each kind of input, and give its objects, by name, to
    ``RearrangingLoader`` and ``RearrangedModel``.
    """

    @property
    def phase(self) -> str:
        """Name of the phase. Encoders of one phase travel together, as images and videos of one vision encoder do."""

    @property
    def takes(self) -> Sequence[str]:
        """Names of a sample's tensors that the encoder takes, whose rows belong to the sample, (rows, ...).

        The first one has rows in every sample with this kind of input.
        """

    @property
    def token_id(self) -> int:
        """The token in ``input_ids`` that stands for each feature."""

    def units(self, sample: Mapping[str, Tensor]) -> tuple[int, int]:
        """What a sample brings to the encoder: units of work, and the sum of squares within which it attends."""

    def blank(self) -> Mapping[str, Tensor]:
        """The smallest input, of the tensors in ``takes``, for ranks without one; its features count for nothing."""

    def encode(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Features of all samples at hand, sample after sample, (features, ...); several by name where layers differ.

        Args:
            tensors: Those in ``takes``, on the model's device, with the rows of all samples: at least one row.
        """

    def insert(self, arguments: dict[str, Any], features: Mapping[str, Tensor]) -> dict[str, Any]:
        """The arguments of the model's forward pass with this encoder's features among them.

        Args:
            arguments: ``input_ids`` and ``position_ids`` of this rank's samples, and what encoders before this one
                have placed.
            features: What ``encode`` gives, of the samples in ``input_ids``: a feature for each ``token_id``.
        """


class VisionEncoder:
    """Images or videos of a model of transformers that takes ``mm_encoder_outputs``."""

    phase = "vision"

    def __init__(
        self, model: nn.Module, blank: Mapping[str, Tensor] | None = None, kind: Literal["image", "video"] = "image"
    ) -> None:
        takes = "mm_encoder_outputs" in signature(model.forward).parameters
        if not takes or not hasattr(getattr(model, "model", None), "get_image_features"):
            raise ConfigError(
                "model must take mm_encoder_outputs and have model.get_image_features, got "
                f"{type(model).__name__}; describe its encoders by omnibal.packs.encoders.EncoderAdapter"
            )
        self._model, self._kind, self._listed = cast("Any", model), kind, False
        self._known = [*_taken(model, kind)]
        self._blank = dict(blank or blank_image(model))
        if kind == "video":  # one slice is an image
            self._blank = {name: self._blank[of] for name, of in zip(VIDEO, ("pixel_values", GRIDS), strict=True)}
        self.takes = VIDEO if kind == "video" else IMAGE

    @property
    def token_id(self) -> int:
        return int(getattr(self._model.config, f"{self._kind}_token_id"))

    def units(self, sample: Mapping[str, Tensor]) -> tuple[int, int]:
        grids = sample.get(f"{self._kind}_grid_thw")
        # Qwen's encoders attend within a temporal slice.
        squared = 0 if grids is None else int((grids[:, 0] * grids[:, 1:].prod(dim=1).square()).sum())
        return len(sample.get(self.takes[0], ())), squared

    def blank(self) -> Mapping[str, Tensor]:
        return self._blank

    def encode(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Features, and deep-stack features beside them."""
        if unknown := tensors.keys() - {*self._known}:
            takes = f"{', '.join(self._known)}, as {type(self._model).__name__} encodes them"
            raise ConfigError(f"{self._kind}s must come as {takes}, got {', '.join(sorted(unknown))} too")
        encode = getattr(self._model.model, f"get_{self._kind}_features")
        encoded = encode(**(as_one_row(tensors) if self._kind == "image" else tensors))
        # Some models give features as a list with a tensor for each image, and want them back like this.
        self._listed = not isinstance(encoded.pooler_output, Tensor)
        deep = enumerate(getattr(encoded, "deepstack_features", None) or ())
        features = {"features": _joined(encoded.pooler_output)}
        return features | {f"deepstack_{number}": _joined(layer) for number, layer in deep}

    def insert(self, arguments: dict[str, Any], features: Mapping[str, Tensor]) -> dict[str, Any]:
        encoded: list[Any] = [[value] if self._listed else value for value in features.values()]
        whole, *deep = encoded
        outputs = BaseModelOutputWithPooling(pooler_output=whole)
        if deep:
            outputs = BaseModelOutputWithDeepstackFeatures(pooler_output=whole, deepstack_features=deep)
        return arguments | {"mm_encoder_outputs": {**arguments.get("mm_encoder_outputs", {}), self._kind: outputs}}


class SoundEncoder:
    """Sounds of Qwen2-Audio or of Qwen2.5-Omni's thinker, whose features take the place of embedded tokens."""

    phase, takes = "sound", PER_SOUND

    def __init__(self, model: nn.Module) -> None:
        self._model, self._arguments = cast("Any", model), arguments_of(model)

    @property
    def token_id(self) -> int:
        return int(self._model.config.audio_token_id)

    def units(self, sample: Mapping[str, Tensor]) -> tuple[int, int]:
        return sum(sounds_of(sample, self._arguments)), 0

    def blank(self) -> Mapping[str, Tensor]:
        config, dtype = self._model.config.audio_config, device_and_dtype(self._model)[1]
        frames = 2 * config.max_source_positions
        mask = (torch.arange(frames) < LEAST_FRAMES).long()[None]
        return dict(zip(PER_SOUND, (torch.zeros((1, config.num_mel_bins, frames), dtype=dtype), mask), strict=True))

    def encode(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        inner, (frames, mask) = self._model.model, (tensors[name] for name in self.takes)
        if hasattr(inner, "get_audio_features"):
            return {"features": inner.get_audio_features(frames, mask).last_hidden_state}
        # As within Qwen2AudioModel.forward, which has no function of its own for it.
        tower = inner.audio_tower
        positions, tokens = tower._get_feat_extract_output_lengths(mask.sum(dim=1))
        real = torch.arange(mask.shape[1] // 2, device=mask.device) < positions[:, None]
        attention = create_bidirectional_mask(tower.config, frames.new_zeros((*real.shape, 1)), real.long())
        features = inner.multi_modal_projector(tower(frames, attention_mask=attention).last_hidden_state)
        return {"features": features[torch.arange(features.shape[1], device=mask.device) < tokens[:, None]]}

    def insert(self, arguments: dict[str, Any], features: Mapping[str, Tensor]) -> dict[str, Any]:
        heard, values = (arguments["input_ids"] == self.token_id)[..., None], features["features"]

        def scatter(module: nn.Module, given: Any, embedded: Tensor) -> Tensor:
            hook.remove()
            return embedded.masked_scatter(heard, values.to(embedded.dtype))

        # The model's own pass embeds on every rank: under ZeRO 3 ranks that ran modules in another order would hang.
        hook = self._model.get_input_embeddings().register_forward_hook(scatter)
        return arguments


def encoders_of(model: Any, *, blank: Mapping[str, Tensor] | None = None) -> dict[str, EncoderAdapter]:
    """The encoders of a model of transformers, by the kind of their inputs: images, videos and sounds.

    Args:
        model: As it is before it is wrapped.
        blank: What ``model.model.get_image_features`` takes of a small image, for ranks without one; by default made
            from the model's configuration. Its pixels must not be zeros, which some models take for padding.

    Raises:
        ConfigError: The model does not take encoded images, or its configuration does not tell what an image is like.
    """
    phases = known_phases(model)
    encoders: dict[str, EncoderAdapter] = {"sound": SoundEncoder(model)} if "sound" in phases else {}
    if "vision" in phases:
        encoders["image"] = VisionEncoder(model, blank)
    if "sound" not in phases and videos_of(positions_of(model.config)) is not None:
        encoders["video"] = VisionEncoder(model, blank, "video")
    return encoders


def encode_in_every_evaluation(model: Any) -> None:
    """Let each forward pass of an evaluation run every encoder, on a blank input where the batch has none."""
    # Under ZeRO 3 and FSDP modules gather their weights from all ranks: a rank with an image would wait for ever for
    # one without.
    if (language := language_of(model)) is None:
        raise ConfigError(f"model must name its language_model or text_model, got {type(model).__name__} without")
    encoders, early, late, hooks = encoders_of(model), list[str](), list[str](), list[Any]()

    def begin(module: nn.Module, args: Any, inputs: Mapping[str, Any]) -> None:
        for kinds in (early, late):
            kinds.clear()
        if module.training or torch.is_grad_enabled() or inputs.get("past_key_values") is not None:
            return
        # Ranks run the encoders in the order of the model's own pass, which takes what is there.
        takes_any = False
        for kind, encoder in encoders.items():
            is_given = inputs.get(encoder.takes[0]) is not None
            takes_any |= is_given
            if not is_given:
                (late if takes_any else early).append(kind)
        if not hooks:  # behind the hooks that DeepSpeed has added: before them it would gather other weights
            hooks.append(model.get_input_embeddings().register_forward_hook(partial(encode, early)))

    def encode(kinds: list[str], *_: Any) -> None:
        for kind in kinds:
            blank = encoders[kind].blank()
            encoders[kind].encode({name: value.to(device_and_dtype(model)[0]) for name, value in blank.items()})

    model.register_forward_pre_hook(begin, with_kwargs=True)
    language.register_forward_pre_hook(partial(encode, late))


def known_phases(model: Any) -> list[str]:
    """Names of the phases of ``encoders_of(model)``, whether or not a blank image is known."""
    family = FAMILIES.get(getattr(getattr(model, "config", None), "model_type", ""))
    if family is None or family.sound_rule is None:
        return ["vision"]
    return ["sound", "vision"] if family.sees else ["sound"]


def blank_samples(model: Any) -> list[dict[str, Tensor]]:
    """A text and the smallest sample of each other kind, for Qwen's models that see videos or hear; else none."""
    model = without_adapters(model)
    if "sound" not in known_phases(model) and videos_of(positions_of(model.config)) is None:
        return []
    # Of patches the fewest that make a token; of sound a convolution and a pooling halve the frames.
    tokens = {"image": 1, "video": 1, "sound": ((LEAST_FRAMES - 1) // 2 - 1) // 2 + 1}
    word = plain_words(model.config)[:1]
    blanks = [(word, dict[str, Tensor]())]
    for kind, encoder in encoders_of(model).items():
        blanks.append((torch.cat([word, torch.full((tokens[kind],), encoder.token_id)]), {**encoder.blank()}))
    return [{"input_ids": ids, **blank, "labels": torch.full_like(ids, IGNORED)} for ids, blank in blanks]


def phases_of(encoders: Mapping[str, EncoderAdapter]) -> list[str]:
    return [*dict.fromkeys(encoder.phase for encoder in encoders.values())]


def blank_image(model: Any) -> dict[str, Tensor]:
    """A small image as a model's encoder takes it, in the precision of its weights."""
    takes = _taken(model)
    try:
        blank = _blank_fields(model.config, takes, device_and_dtype(model)[1])
    except AttributeError:
        blank = {}
    needed = [name for name, parameter in takes.items() if parameter.default is parameter.empty]
    if not blank.keys() >= {*needed}:
        raise ConfigError(
            f"blank must be a small image of {', '.join(needed)}, as {type(model).__name__} encodes it, got none, and "
            "the model's configuration does not tell one; pass encoders_of(model, blank={...})"
        )
    return blank


def image_tokens(model: Any, images: Mapping[str, Tensor]) -> int:
    """How many tokens of the language model stand for some images."""
    if not images:
        return 0
    with torch.no_grad():
        on_device = {name: value.to(device_and_dtype(model)[0]) for name, value in images.items()}
        encoded = model.model.get_image_features(**as_one_row(on_device))
    return len(_joined(encoded.pooler_output))


def _taken(model: Any, kind: str = "image") -> dict[str, Parameter]:
    """Arguments of a model's encoder, tensors and settings."""
    parameters = signature(getattr(model.model, f"get_{kind}_features")).parameters
    gathering = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return {name: parameter for name, parameter in parameters.items() if parameter.kind not in gathering}


def _blank_fields(config: Any, takes: Mapping[str, Parameter], dtype: torch.dtype) -> dict[str, Tensor]:
    """The smallest image that the encoder takes; AttributeError if the configuration does not tell its sizes."""
    vision, tiles = config.vision_config, 1
    if "image_grid_thw" in takes:  # native resolution: as many patches as make one token
        side = vision.spatial_merge_size
        values = getattr(vision, "in_channels", 3) * vision.temporal_patch_size * vision.patch_size**2
        pixels = torch.ones((side**2, values), dtype=dtype)
        return {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, side, side]])}
    if "image_position_ids" in takes:  # each patch with its position: as many as make two by two tokens
        positions = torch.cartesian_prod(*2 * [torch.arange(2 * vision.pooling_kernel_size)])[None]
        pixels = torch.ones((1, positions.shape[1], 3 * vision.patch_size**2), dtype=dtype)
        return {"pixel_values": pixels, "image_position_ids": positions}
    # One tile; for models that see a grid of tiles beside the whole, the smallest grid.
    # Pixtral takes images of any size: two by two tokens, for Mistral3 cannot encode a single one.
    native = hasattr(config, "spatial_merge_size")
    size = 2 * vision.patch_size * config.spatial_merge_size if native else vision.image_size
    height, width = image = (size, size) if isinstance(size, int) else size
    if pinpoints := getattr(config, "image_grid_pinpoints", None):
        image = min(pinpoints, key=prod)
        tiles += prod(image) // (height * width)
    blank = {"pixel_values": torch.ones((tiles, vision.num_channels, height, width), dtype=dtype)}
    if "image_sizes" in takes and takes["image_sizes"].default is Parameter.empty:
        blank["image_sizes"] = torch.tensor([image])
    if "pixel_attention_mask" in takes:
        blank["pixel_attention_mask"] = torch.ones((tiles, height, width), dtype=torch.long)
    return blank


def device_and_dtype(model: nn.Module) -> tuple[torch.device, torch.dtype]:
    """Device and precision of a model: those of its first weight that is not quantized to integers."""
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    return weight.device, weight.dtype


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Features of all images, (image tokens, hidden)."""
    if isinstance(features, Tensor):
        return features.reshape(-1, features.shape[-1])
    return torch.cat([*features])
