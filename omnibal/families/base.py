"""What a model family says of itself: its pipeline layers, what images bring to it, its names and its text."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, Protocol, TypeVar

from omnibal.errors import ConfigError, integer

if TYPE_CHECKING:
    from omnibal.families.parts import Cut

# A configuration as a dict: ``config.to_dict()`` of a model, ``processor.to_dict()`` of an image processor.
Config = Mapping[str, Any]
Module = Literal["sound", "vision", "projector", "language"]
WINDOWS: Final = "windows"  # what the first encoder counts if a model hears and does not see
ONLY: Final = "only:"  # before a kind of layers: this kind alone, where others have its common name
# Sizes of a layer under LoRA: parameters of its adapters, which "parameters" counts too; their ranks, added up; and the
# widths of what dropout makes for each of them, nothing without dropout.
ADAPTER_SIZES = ("adapters", "adapter_ranks", "adapter_inputs")


class Layer(Protocol):
    """What users name layers by: a ``LayerRecord``, or the costs of such a layer."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def module(self) -> Module: ...
    @property
    def tied_key(self) -> str | None: ...
    @property
    def sizes(self) -> Mapping[str, int]: ...


L = TypeVar("L", bound=Layer)


def common_name(layer: Layer) -> str:
    """A layer's name without its number: all blocks of a ViT have it, of whatever kinds they are."""
    stem, _, number = layer.name.rpartition(".")
    return stem if stem and number.isdecimal() else layer.name


def is_named(layer: Layer, words: Collection[str]) -> bool:
    """Whether one of a user's words stands for a layer as a whole: its module, common name or kind."""
    return any(word in words for word in (layer.module, common_name(layer), layer.kind, ONLY + layer.kind))


def encoder_layers(layers: Iterable[Layer]) -> int:
    """How many of the first layers are the encoder's: all before the first one of the language model."""
    found = next((index for index, layer in enumerate(layers) if layer.module == "language"), 0)
    if found == 0:
        raise ConfigError("a model must begin with an encoder to place it, got one that begins with language layers")
    return found


class TrainedCount(NamedTuple):
    trained: int
    parameters: int


@dataclass(frozen=True)
class LayerRecord:
    """One pipeline layer: the smallest part of a model that a partition moves between stages."""

    name: str
    """Unique in the model, such as ``"vision_block.3"``; the name without number freezes or adapts all such blocks."""
    kind: str
    """What the layer computes, such as ``"vision_block"``; layers of one kind and equal sizes cost alike."""
    sizes: Mapping[str, int] = field(hash=False)
    """Widths and counts that decide the cost, ``"parameters"`` among them, and ``"untrained"``: parameters without a
    gradient. Under LoRA also ``ADAPTER_SIZES``."""
    tied_key: str | None = None
    """Layers with the same key share one weight."""
    _: KW_ONLY
    module: Module
    """Costs of the language model's layers depend on tokens, those of an encoder of sound beside a ViT on sound units,
    costs of all others on vision units."""
    token_bytes: int = 16
    """Bytes of the integers (id and position) that a cut behind the layer sends for each LLM token."""
    weights: Mapping[str, int] = field(default_factory=dict, compare=False, repr=False)
    """From name on disk to number of elements, for weights that may get a gradient; 0 where LoRA leaves the weight as
    it is. Empty where only a configuration is known."""

    def freezes(self, weight: str, frozen: Collection[str]) -> bool:
        """Whether a weight of this layer, by its name on disk, is frozen: LoRA leaves it, or ``frozen`` names it."""
        whole = is_named(self, frozen) or self.weights.get(weight) == 0
        return whole or any(fnmatchcase(weight, pattern) for pattern in frozen)

    def trainable_parameters(self, frozen: Collection[str]) -> int:
        """Parameters that get a gradient, if kinds, modules and weights that ``frozen`` names are not trained."""
        if is_named(self, frozen):
            return 0
        not_trained = sum(size for name, size in self.weights.items() if self.freezes(name, frozen))
        return self.sizes["parameters"] - self.sizes.get("untrained", 0) - not_trained

    def trained(self, frozen: Collection[str]) -> TrainedCount:
        return TrainedCount(self.trainable_parameters(frozen), self.sizes["parameters"])


def numbered(kind: str, module: Module, sizes: Iterable[Mapping[str, int]]) -> Iterator[LayerRecord]:
    """A record ``kind.number`` for each entry of ``sizes``."""
    return (LayerRecord(f"{kind}.{i}", kind, own, module=module) for i, own in enumerate(sizes))


def vision_unit_of(layers: Iterable[Layer]) -> str:
    """What the first encoder counts: ``"tiles"``, ``"patches"``, or ``"vision units"`` if none says."""
    # Where there is no ViT, the encoder of sound counts ``"windows"``.
    counted = {layer.module: layer.sizes["patches_per_tile"] for layer in layers if "patches_per_tile" in layer.sizes}
    if "sound" in counted and "vision" not in counted:
        return WINDOWS
    patches = counted.get("vision", counted.get("projector"))
    return "vision units" if patches is None else "patches" if patches == 1 else "tiles"


class ImageLoad(NamedTuple):
    vision_units: int  # tiles; patches in a native-resolution ViT
    llm_tokens: int  # tokens that stand for it in the LLM, brackets not counted
    vision_squared: int = 0  # square of its patches in a native-resolution ViT, whose attention covers the image


Size = tuple[int, int]  # (width, height) of an image in pixels, both at least 1
# From the sizes of a sample's images to what each brings; a ValueError says why the model refuses such an image.
ImageRule = Callable[[Sequence[Size]], tuple[ImageLoad, ...]]


def each(rule: Callable[..., ImageLoad], *facts: Any) -> ImageRule:
    """A rule that looks at every image by itself: ``rule(*facts, width, height)``."""
    return partial(_each, rule, facts)  # no closure: datasets that hold rules must be picklable


def _each(rule: Callable[..., ImageLoad], facts: tuple[Any, ...], sizes: Sequence[Size]) -> tuple[ImageLoad, ...]:
    return tuple(rule(*facts, width, height) for width, height in sizes)


class VideoHeader(NamedTuple):
    """What a container says of a video without decoding it; of a list of images, which is frames, ``fps`` is None."""

    width: int
    height: int
    frames: int
    fps: float | None


class VideoLoad(NamedTuple):
    numbers: Sequence[int]  # frames that are sampled, ascending
    grid: tuple[int, int, int]  # temporal slices, rows and columns of patches
    runs: tuple[int, ...]  # LLM tokens of each run that stands for patches of the video
    seconds: tuple[float, ...] = ()  # the time that a model reads before each run; empty where it reads none

    @property
    def vision_units(self) -> int:
        return prod(self.grid)

    @property
    def llm_tokens(self) -> int:
        """Tokens that stand for patches: neither brackets nor times."""
        return sum(self.runs)

    @property
    def vision_squared(self) -> int:
        """Attention stays within a temporal slice: ``slices · (rows · columns)²``."""
        slices, rows, columns = self.grid
        return slices * (rows * columns) ** 2


# From a video's header to what the video brings; a ValueError says why the model refuses such a video.
VideoRule = Callable[[VideoHeader], VideoLoad]


class SoundHeader(NamedTuple):
    samples: int  # of one channel
    rate: int  # samples a second


class SoundLoad(NamedTuple):
    vision_units: int  # windows of a model that hears alone, each as long as the longest sound; 0 beside a ViT
    sound_units: int  # positions of an encoder beside a ViT, or 0
    llm_tokens: int


# From a sound's header to what the sound brings; a ValueError says why the model refuses such a sound.
SoundRule = Callable[[SoundHeader], SoundLoad]


@dataclass(frozen=True, kw_only=True)
class Family:
    """The facts of models that are built alike: all that the rest of the package knows of them.

    Attributes:
        model_types: Values of ``model_type`` in the configurations of such models.
        image_rule: Makes the rule of a model from its configuration and its image processor's.
        layer_records: Lists a model's pipeline layers, first to last, from its configuration.
        layers: What makes these layers as modules: ``"module:function"``, from transformers' configuration to an
            ``omnibal.vlm.VisionLanguageModel``. A name, since facts load no torch; None where a family is planned for
            and not trained.
        tile_limits: Where an image may be cut into more or fewer tiles: from the image processor's configuration,
            ``max_tiles`` and ``min_tiles`` (None for what the processor says), what the processor is told with images.
        disk_prefixes: From prefixes of parameter names in memory to those in a folder of weights.
        cuts: How tensor ranks share modules, by shell patterns of how their paths in the Hugging Face model end; what
            none matches is whole on every rank. Empty where tensor ranks cannot share the family's layers.
        image_tokens: Where conversations are ChatML: attributes of the tokenizer that name the token before an image,
            the one for a piece of it and the one after it, with the usual names. Empty where the chat template of the
            folder writes conversations.
        video_rule: Makes the rule of a model from its configuration and its video processor's; None where videos are
            refused.
        video_processor: The class of transformers' that the rule follows, ``"module:class"``.
        video_settings: Its whole configuration from what a folder says of it.
        sound_rule: Makes the rule of a model from its configuration and its feature extractor's; None where sounds are
            refused.
        sees: Whether the model has a ViT; where it has none, vision units are windows of sound.
    """

    model_types: tuple[str, ...]
    image_rule: Callable[[Config, Config], ImageRule]
    layer_records: Callable[[Config], tuple[LayerRecord, ...]]
    layers: str | None = None
    tile_limits: Callable[[Config, int | None, int | None], dict[str, Any]] | None = None
    disk_prefixes: Mapping[str, str] = field(default_factory=dict)
    cuts: Mapping[str, "Cut"] = field(default_factory=dict)
    image_tokens: Mapping[str, str] = field(default_factory=dict)
    video_rule: Callable[[Config, Config], VideoRule] | None = None
    video_processor: str = ""
    video_settings: Callable[[Config], Config] = dict
    sound_rule: Callable[[Config, Config], SoundRule] | None = None
    sees: bool = True

    def images(
        self, config: Config, preprocessor: Config, *, max_tiles: int | None = None, min_tiles: int | None = None
    ) -> tuple[dict[str, Any], ImageRule]:
        """What an image processor is told beside images, and what images then bring.

        ``config`` and ``preprocessor`` are the dicts of the model's and the image processor's configuration; limits of
        tiles are by default what the preprocessor says.
        """
        options: dict[str, Any] = {}
        if self.tile_limits is not None:
            options = self.tile_limits(preprocessor, max_tiles, min_tiles)
        elif max_tiles is not None or min_tiles is not None:
            model_type = config["model_type"]
            raise ConfigError(
                f"max_tiles and min_tiles must be left out for {model_type}, got {max_tiles}, {min_tiles}"
            )
        return options, self.image_rule(config, {**preprocessor, **options})


def check_frozen(records: Sequence[LayerRecord], frozen: Collection[str]) -> tuple[str, ...]:
    """Sorted kinds of layers and patterns of weights that are not trained; refuses words that name nothing."""
    # ``frozen`` holds modules, common names or kinds of layers, and shell patterns of weights' names on disk. A kind
    # comes back with ``only:`` before it if other layers of its common name are trained.
    if not frozen:
        return ()
    for name in frozen:
        _check_frozen_name(records, name)
        _check_covers_blocks(records, name, frozen)
    if not any(record.trainable_parameters(frozen) for record in records):
        raise ConfigError(f"frozen must leave layers to train, got all of them by {', '.join(map(repr, frozen))}")
    tied = [record for record in records if record.tied_key is not None]
    for record in tied:
        others = [other for other in tied if other.tied_key == record.tied_key]
        trained = [other.kind for other in others if other.trainable_parameters(frozen)]
        if trained and not record.trainable_parameters(frozen):
            raise ConfigError(
                f"frozen must hold all kinds that share weights, got {record.kind!r} without {trained[0]!r}"
            )
    return spelled_out(records, frozen)


def spelled_out(layers: Sequence[Layer], frozen: Collection[str]) -> tuple[str, ...]:
    """The words of ``frozen`` in the one form in which lists that freeze the same layers are equal."""
    # Words that stand for no layer count as patterns; `check_frozen` refuses wrong ones.
    patterns = {word for word in frozen if not any(is_named(layer, (word,)) for layer in layers)}
    return tuple(sorted(kinds_of([layer for layer in layers if is_named(layer, frozen)], layers) | patterns))


def kinds_of(chosen: Sequence[L], layers: Sequence[L]) -> set[str]:
    """Kinds of chosen layers; with ``only:`` before those whose common name some layer has that is not chosen."""
    names = {layer.name for layer in chosen}
    others = {common_name(layer) for layer in layers if layer.name not in names}
    return {f"{ONLY if common_name(layer) in others else ''}{layer.kind}" for layer in chosen}


def _check_frozen_name(records: Sequence[LayerRecord], name: str) -> None:
    weights = [weight for record in records for weight in record.weights]
    if any(is_named(record, (name,)) for record in records) or any(fnmatchcase(weight, name) for weight in weights):
        return
    kinds = [*dict.fromkeys(word for record in records for word in (common_name(record), record.kind))]
    modules = [*dict.fromkeys(record.module for record in records)]
    literal = "".join(character for character in name if character not in "*?[]")
    nearest = get_close_matches(literal, dict.fromkeys([*kinds, *modules, *weights]), n=3, cutoff=0.4)
    remedy = f"; did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
    raise ConfigError(
        f"frozen must hold kinds of the model's layers ({', '.join(kinds)}), modules ({', '.join(modules)}) or "
        f"patterns of its weights' names, got {name!r}{remedy}"
    )


def _check_covers_blocks(records: Sequence[LayerRecord], name: str, frozen: Collection[str]) -> None:
    """Refuse a kind that is some of the blocks only, where neither ``only:`` nor the rest of the list says so."""
    common = next((common_name(record) for record in records if record.kind == name), name)
    blocks = [record for record in records if common_name(record) == common]
    trained = sum(record.trainable_parameters(frozen) > 0 for record in blocks)
    if name != common and trained:
        raise ConfigError(
            f"frozen must hold all of a module's blocks or say that it does not, got {name!r}, which leaves {trained} "
            f"of {len(blocks)} to train; {common!r} freezes all of them, {ONLY + name!r} these alone"
        )


def trained_by_module(layers: Iterable[tuple[Layer, TrainedCount]]) -> dict[str, TrainedCount]:
    """What each module of a model trains, from what each of the model's layers does; tied weights count once."""
    kinds, keys, sums = set[str](), set[str | None](), dict[str, TrainedCount]()
    for layer, (trained, parameters) in layers:
        kinds.add(layer.kind)
        if layer.tied_key not in keys:
            before = sums.get(layer.module, TrainedCount(0, 0))
            sums[layer.module] = TrainedCount(before.trained + trained, before.parameters + parameters)
        keys |= {layer.tied_key} - {None}  # layers without a key share nothing
    # Qwen3-VL's mergers lie within blocks of its ViT.
    merges = " (deep-stack mergers included)" if "deepstack_block" in kinds else ""
    return {module + merges * (module == "vision"): numbers for module, numbers in sums.items()}


def trained_in_words(modules: Mapping[str, TrainedCount]) -> str:
    """What modules train, in millions.

    >>> trained_in_words({"vision": TrainedCount(0, 2_000_000), "language": TrainedCount(7_000_000_000, 7_000_000_000)})
    'vision none of 2.0 M, language all 7,000.0 M'
    """
    words = []
    for name, (trained, parameters) in modules.items():
        part = "all" if trained == parameters else f"{trained / 1e6:,.1f} of" if trained else "none of"
        words.append(f"{name} {part} {parameters / 1e6:,.1f} M")
    return ", ".join(words)


def section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key)
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key} must be a nested configuration, got {value!r}")
    return value


def size(config: Mapping[str, Any], key: str, *, default: int | None = None) -> int:
    """The positive integer ``config[key]``.

    >>> size({"num_key_value_heads": None}, "num_key_value_heads", default=8)
    8
    """
    value = config.get(key)
    if value is None and default is not None:
        return default
    if value is None:
        raise ConfigError(
            f"{key} must be given, got nothing; pass the full configuration, as config.to_dict() gives it"
        )
    return integer(key, value, 1)


def size_pair(config: Mapping[str, Any], key: str) -> tuple[int, int]:
    """The (height, width) at ``config[key]``; one integer stands for both.

    >>> size_pair({"image_size": 448}, "image_size"), size_pair({"image_size": [448, 224]}, "image_size")
    ((448, 448), (448, 224))
    """
    value = config.get(key)
    if isinstance(value, list | tuple) and len(value) == 2:
        height, width = (size({key: side}, key) for side in value)
        return height, width
    side = size(config, key)
    return side, side


def square(preprocessor: Config, key: str) -> int:
    sides = section(preprocessor, key)
    if size(sides, "height") != size(sides, "width"):
        raise ConfigError(f"{key} of the preprocessor must be square, got {dict(sides)}")
    return size(sides, "height")
