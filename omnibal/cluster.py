"""The hardware (Cluster) and how a run lies on it (Layout), as far as time and memory depend on them."""

import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Annotated, Any, Final, Literal, NamedTuple, get_args

from pydantic import BeforeValidator, ConfigDict, TypeAdapter, ValidationError

from omnibal.device import Device
from omnibal.errors import ConfigError
from omnibal.records import explain

# Of links: beyond these a step has no end that numbers could hold.
LEAST_BANDWIDTH: Final = 1
MOST_LATENCY_SECONDS: Final = 3600
MOST_DEVICES: Final = 10**6
# What a process holds on its device beside the model, unless it was measured: a context with the kernels that were
# used, 0.3 to 0.5 GB (pytorch/pytorch#107667, #81257), and NCCL's buffers of the two communicators that a rank moves
# most with, of its replicas and of its stages, 0.54 to 0.69 GB each (NVIDIA/nccl#964, four A100). Together up to 1.9
# GB, rounded up. Fragments belong to the margin (device.py).
OVERHEAD_BYTES: Final = 2 * 2**30
Precision = Literal["bfloat16", "float32"]


def check_zero_stage(zero_stage: int) -> None:
    """Refuse a ZeRO stage that DeepSpeed's pipeline does not have: it is neither 0 nor 1."""
    if zero_stage not in (0, 1):
        raise ConfigError(f"zero_stage must be 0 or 1 under a pipeline, got {zero_stage}")


class PipelinePosition(NamedTuple):
    stage: int
    replica: int
    tensor: int = 0


@dataclass(frozen=True)
class Encoder:
    """The encoder of a run, where it has replicas and tensor ranks of its own.

    Source of ``"own"``: Zhang et al., DistTrain, SIGCOMM 2025, section 4.
    """

    num_stages: int
    """The first stages of the run; 0 where the encoder is spread."""
    num_replicas: int
    num_tensor: int = 1
    placement: Literal["own", "spread"] = "own"
    """``own``: devices beside those of the language model (units). ``spread``: the whole encoder is on all devices of
    the language model, and runs before and behind its pipeline."""

    @classmethod
    def on_all(cls, num_devices: int) -> "Encoder":
        return cls(0, num_devices, placement="spread")

    def __str__(self) -> str:
        return _in_words(self.num_stages, self.num_replicas, self.num_tensor)

    @property
    def num_devices(self) -> int:
        return max(self.num_stages, 1) * self.num_replicas * self.num_tensor


@dataclass(frozen=True)
class Layout:
    """How a run is spread over devices: stages × replicas × tensor ranks, what replicas share, and in which numbers.

    Only this class knows which rank is which: `rank` and `position` are each other's inverse. As in DeepSpeed's
    topologies, a rank's tensor rank runs fastest, and its stage slowest.

    Raises:
        ConfigError: A number is not positive, the encoder leaves no stage to the language model, DeepSpeed's pipeline
            has no such ZeRO stage, or cannot sum gradients so.

    Example:
        >>> layout = Layout(num_stages=4, num_replicas=2)
        >>> layout.num_devices, layout.rank(stage=1, replica=0), layout.position(3), str(layout)
        (8, 2, PipelinePosition(stage=1, replica=1, tensor=0), '4 stages × 2 replicas')
        >>> apart = Layout(num_stages=3, num_replicas=2, num_tensor=2, encoder=Encoder(num_stages=1, num_replicas=3))
        >>> apart.num_devices, apart.position(2), apart.position(3)  # ranks 0, 1 and 2 hold the encoder
        (11, PipelinePosition(stage=0, replica=2, tensor=0), PipelinePosition(stage=1, replica=0, tensor=0))
    """

    num_stages: int = 1
    """Pipeline stages, those of the encoder among them."""
    num_replicas: int = 1
    """Data-parallel ranks of each stage."""
    _: KW_ONLY
    num_tensor: int = 1
    """Devices that share each layer (tensor parallelism)."""
    encoder: Encoder | None = None
    """Replicas and tensor ranks of the first stages where they differ from those of all others; None: they do not."""
    zero_stage: int = 1
    """0, or 1: each replica holds and updates its share of the optimizer's state. In 16 bits DeepSpeed shares it under
    0 too, and keeps a second copy of the gradients."""
    precision: Precision = "bfloat16"
    """The dtype of forward and backward passes."""
    accumulate_float32: bool | None = None
    """Whether gradients are summed up in float32 beside those in the forward pass's 16 bits (DeepSpeed's
    ``data_types.grad_accum_dtype``), for 4 bytes more a trained parameter; None for what the engine does unless told
    otherwise: under ZeRO stage 1."""

    def __post_init__(self) -> None:
        for part, whose in ((self, ""), (self.encoder, " of the encoder")):
            for name in ("num_stages", "num_replicas", "num_tensor"):
                is_spread = isinstance(part, Encoder) and part.placement == "spread" and name == "num_stages"
                if part is not None and getattr(part, name) < 1 and not is_spread:
                    raise ConfigError(f"{name}{whose} must be positive, got {getattr(part, name)}")
        if self.encoder is not None:
            self._check_encoder(self.encoder)
        if self.precision not in get_args(Precision):
            raise ConfigError(f"precision must be one of {', '.join(get_args(Precision))}, got {self.precision!r}")
        check_zero_stage(self.zero_stage)
        if self.sums_float32 and self.zero_stage == 0:
            raise ConfigError("zero_stage must be 1 where 16-bit gradients are summed in float32, got 0")

    def _check_encoder(self, encoder: Encoder) -> None:
        if encoder.num_stages >= self.num_stages:
            raise ConfigError(
                f"num_stages of the encoder must be less than all {self.num_stages}, got {encoder.num_stages}"
            )
        copies = encoder.num_replicas * encoder.num_tensor
        if encoder.placement == "spread" and (encoder.num_stages, copies) != (0, self.num_devices):
            raise ConfigError(
                f"an encoder that is spread must have no stages of its own and be on all {self.num_devices} devices, "
                f"got {encoder.num_stages} stages on {copies}"
            )

    def __str__(self) -> str:
        part, encoder = _in_words, self.encoder
        if encoder is None or encoder.placement == "spread":
            return part(self.num_stages, self.num_replicas, self.num_tensor) + ", encoder on all" * (
                encoder is not None
            )
        return f"{encoder}, then {part(self.num_stages - encoder.num_stages, self.num_replicas, self.num_tensor)}"

    @property
    def num_devices(self) -> int:
        return self._first_ranks[-1]

    @property
    def has_units(self) -> bool:
        """Whether the encoder has devices, and replicas, of its own."""
        return self.encoder is not None and self.encoder.placement == "own"

    @property
    def has_tensor_ranks(self) -> bool:
        return max(self.num_tensor, 1 if self.encoder is None else self.encoder.num_tensor) > 1

    @property
    def has_even_units(self) -> bool:
        """Whether the encoder has devices of its own, and one number of replicas divides the other."""
        fewer, more = sorted((self.shape(0)[0], self.num_replicas))
        return self.has_units and more % fewer == 0

    @property
    def is_spread(self) -> bool:
        return self.encoder is not None and self.encoder.placement == "spread"

    @property
    def encoder_stages(self) -> int:
        """How many of the first stages are the encoder's alone."""
        return 0 if self.encoder is None else self.encoder.num_stages

    @property
    def num_columns(self) -> int:
        """Groups of ranks that pass micro-batches to each other, of all stages: as many as the fewest replicas."""
        return min(self.shape(0)[0], self.num_replicas)

    @property
    def parts(self) -> "tuple[Layout, Layout]":
        """The encoder and the LLM as layouts of their own, where they differ; a spread encoder has a single stage."""
        own = self.encoder
        assert own is not None, "the caller has an encoder"
        alone, stages = replace(self, encoder=None), max(own.num_stages, 1)
        first = replace(alone, num_stages=stages, num_replicas=own.num_replicas, num_tensor=own.num_tensor)
        return first, replace(alone, num_stages=self.num_stages - own.num_stages)

    def of_stage(self, stage: int) -> "Layout":
        """The layout in which all stages have the replicas and tensor ranks of this one."""
        num_replicas, num_tensor = self.shape(stage)
        return replace(self, num_replicas=num_replicas, num_tensor=num_tensor, encoder=None)

    def shape(self, stage: int) -> tuple[int, int]:
        if self.encoder is not None and stage < self.encoder_stages:
            return self.encoder.num_replicas, self.encoder.num_tensor
        return self.num_replicas, self.num_tensor

    def ranks(self, stage: int) -> range:
        return range(*self._first_ranks[stage : stage + 2])

    @cached_property
    def _first_ranks(self) -> list[int]:
        # The first rank of each stage; last, the number of devices.
        sizes = (math.prod(self.shape(stage)) for stage in range(self.num_stages))
        return list(accumulate(sizes, initial=0))

    @property
    def sums_float32(self) -> bool:
        """Whether gradients are summed in float32 beside those of the forward pass."""
        if self.precision == "float32":
            return False
        return self.zero_stage == 1 if self.accumulate_float32 is None else self.accumulate_float32

    def rank(self, stage: int, replica: int, tensor: int = 0) -> int:
        return self._first_ranks[stage] + replica * self.shape(stage)[1] + tensor

    def position(self, rank: int) -> PipelinePosition:
        if not 0 <= rank < self.num_devices:
            raise ConfigError(f"rank must be below the layout's {self.num_devices} devices, got {rank}")
        first_ranks = self._first_ranks
        stage = bisect_right(first_ranks, rank) - 1
        return PipelinePosition(stage, *divmod(rank - first_ranks[stage], self.shape(stage)[1]))


def _in_words(num_stages: int, num_replicas: int, num_tensor: int) -> str:
    counts = {"stage": num_stages, "replica": num_replicas, "tensor rank": num_tensor}
    named = {name: count for name, count in counts.items() if name != "tensor rank" or count > 1}
    return " × ".join(f"{count} {name}{'s' * (count > 1)}" for name, count in named.items())


@dataclass(frozen=True)
class Links:
    """How fast data moves between the ranks of a run.

    Raises:
        ConfigError: A bandwidth is less than a byte per second, or the latency is negative or above an hour.
    """

    bandwidth_bytes_per_second: float
    """Between neighbouring stages; infinity for free transfers."""
    _: KW_ONLY
    reduce_bandwidth_bytes_per_second: float | None = None
    """Between replicas, for the gradients; None: as between stages."""
    latency_seconds: float = 0.0
    """What each transfer between stages takes whatever its size."""

    def __post_init__(self) -> None:
        _check_links(
            self.latency_seconds,
            bandwidth_bytes_per_second=self.bandwidth_bytes_per_second,
            reduce_bandwidth_bytes_per_second=self.reduce_bandwidth_bytes_per_second,
        )

    @property
    def between_replicas(self) -> float:
        given = self.reduce_bandwidth_bytes_per_second
        return self.bandwidth_bytes_per_second if given is None else given


@dataclass(frozen=True)
class Cluster:
    """The machines of a run: equal nodes of equal devices.

    Raises:
        ConfigError: A number is out of range, memory is not given for each device, or nothing is known of how nodes are
            joined.

    Example:
        >>> cluster = Cluster.parse("2x8xA100-80GB")
        >>> cluster.num_devices, str(cluster), cluster.links_of(Layout(num_stages=2, num_replicas=8))
        (16, '2x8xA100-80GB', Links(bandwidth_bytes_per_second=25000000000.0, \
reduce_bandwidth_bytes_per_second=300000000000.0, latency_seconds=0.0))
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)  # of records
    num_nodes: int
    devices_per_node: int
    device: Annotated[Device, BeforeValidator(Device.of)]
    _: KW_ONLY
    node_bytes_per_second: float | None = None
    """From a device of one node to one of another; None: as the device's usual systems have."""
    latency_seconds: float = 0.0
    """What each transfer between stages takes whatever its size."""
    memory_bytes: float | tuple[float, ...] | None = None
    """What each device may hold, or one number for every rank in turn; None: what the device has."""
    overhead_bytes: int = OVERHEAD_BYTES
    """What a process holds on its device beside the model; a run on CUDA says what it was."""
    links: Links | None = None
    """What stages and replicas of the run at hand are known to reach, in place of what follows from the nodes."""

    def __post_init__(self) -> None:
        for name in ("num_nodes", "devices_per_node"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.num_devices > MOST_DEVICES:
            raise ConfigError(f"a cluster must have at most {MOST_DEVICES} devices, got {self.num_devices}")
        if self.num_nodes > 1 and self.links is None and self._between_nodes is None:
            raise ConfigError(
                f"node_bytes_per_second must be given for {self.num_nodes} nodes of {self.device.name}, got none"
            )
        _check_links(self.latency_seconds, node_bytes_per_second=self.node_bytes_per_second)
        if isinstance(self.memory_bytes, tuple) and len(self.memory_bytes) != self.num_devices:
            got = f"got {len(self.memory_bytes)}"
            raise ConfigError(f"memory_bytes must be one number, or one for each of {self.num_devices} devices, {got}")
        if self.overhead_bytes < 0:
            raise ConfigError(f"overhead_bytes must not be negative, got {self.overhead_bytes}")
        given = self.memory_bytes if isinstance(self.memory_bytes, tuple) else (self.memory_bytes,)
        for value in (self.device.memory_bytes if one is None else one for one in given):
            if not (math.isfinite(value) and value > self.overhead_bytes):
                raise ConfigError(
                    f"memory_bytes must be finite and more than the {self.overhead_bytes} bytes that a device holds "
                    f"beside the model, got {value!r}"
                )

    @classmethod
    def parse(cls, text: str) -> "Cluster":
        """Read nodes x devices x device, such as ``"4x8xA100-80GB"``; ``"8xA100-80GB"`` is one node."""
        found = re.fullmatch(r"(?:(\d{1,9})x)?(?:(\d{1,9})x)?([^\s\d].*)", text.strip())
        if found is None:
            near = re.fullmatch(r"((?:\d+x)?\d+)\s*([^\s\dx].*)", text.strip())  # "8A100": a count without its x
            remedy = f"; did you mean {str(cls.parse('x'.join(near.groups())))!r}?" if near else ""
            known = "'4x8xA100-80GB', '8xA100-80GB' or 'A100-80GB'"
            raise ConfigError(f"cluster must be such as {known}, got {text!r}{remedy}")
        *counts, name = (word for word in found.groups() if word is not None)
        num_nodes, devices_per_node = [1, 1, *map(int, counts)][-2:]
        return cls(num_nodes, devices_per_node, Device.named(name))

    @classmethod
    def of(cls, given: "Cluster | str | Mapping[str, Any]") -> "Cluster":
        """From a string as :meth:`parse` reads it, or a record of the fields, whose device may be a name.

        >>> str(Cluster.of({"num_nodes": 1, "devices_per_node": 8, "device": "h100", "memory_bytes": 64e9}))
        '8xH100-80GB'
        """
        if isinstance(given, Cluster):
            return given
        if isinstance(given, str):
            return cls.parse(given)
        if not isinstance(given, Mapping):
            raise ConfigError(f"cluster must be a string such as '4x8xA100-80GB' or a record, got {given!r:.80}")
        try:
            return _RECORD.validate_json(json.dumps(dict(given)))  # by JSON's rules: a list serves as a tuple
        except ValidationError as error:
            raise ConfigError(explain(cls, error, "cluster")) from error

    def __str__(self) -> str:
        counts = (self.num_nodes, self.devices_per_node)
        shown = counts if self.num_nodes > 1 else counts[1:] if self.devices_per_node > 1 else ()
        return "x".join([*map(str, shown), self.device.name])

    @property
    def num_devices(self) -> int:
        return self.num_nodes * self.devices_per_node

    def links_of(self, layout: Layout, *, of_encoder: bool = False) -> Links:
        """What neighbouring stages and replicas of a layout reach: of all its pairs of devices the slowest counts.

        Ranks fill the nodes in their order. Of units replicas are the language model's, or the encoder's if asked so.
        """
        self.check(layout)
        if self.links is not None:
            return self.links
        # Replicas are thought of as one ring, in which each device has one neighbour; where several devices of a node
        # are in it, NCCL's several rings may do better.
        per_node = self.devices_per_node
        stages_apart = any(one // per_node != other // per_node for one, other in _neighbours(layout))
        replicas_apart = any(
            layout.rank(stage, 0, tensor) // per_node
            != layout.rank(stage, layout.shape(stage)[0] - 1, tensor) // per_node
            for stage in range(layout.num_stages)
            if (stage < layout.encoder_stages) == of_encoder
            for tensor in range(layout.shape(stage)[1])
        )
        return Links(
            self.bandwidth(across_nodes=stages_apart),
            reduce_bandwidth_bytes_per_second=self.bandwidth(across_nodes=replicas_apart),
            latency_seconds=self.latency_seconds,
        )

    def stage_memory_bytes(self, layout: Layout) -> tuple[int, ...]:
        """What every device of each stage has at least."""
        self.check(layout)
        given = self.device.memory_bytes if self.memory_bytes is None else self.memory_bytes
        of_ranks = given if isinstance(given, tuple) else (given,) * layout.num_devices
        return tuple(int(min(of_ranks[rank] for rank in layout.ranks(stage))) for stage in range(layout.num_stages))

    def allocatable_bytes(self, layout: Layout) -> tuple[int, ...]:
        """What tensors may take on every device of each stage at least: its memory without the overhead."""
        return tuple(memory - self.overhead_bytes for memory in self.stage_memory_bytes(layout))

    def check(self, layout: Layout) -> None:
        if layout.num_devices > self.num_devices:
            raise ConfigError(
                f"layout must have at most the {self.num_devices} devices of {self}, got {layout.num_devices}: {layout}"
            )

    @property
    def _between_nodes(self) -> float | None:
        return self.device.node_bytes_per_second if self.node_bytes_per_second is None else self.node_bytes_per_second

    def bandwidth(self, *, across_nodes: bool) -> float:
        """Bytes a second from a device to another one of its node, or of another node."""
        within = self.device.link_bytes_per_second
        return min(within, self._between_nodes or within) if across_nodes else within


def _neighbours(layout: Layout) -> Iterator[tuple[int, int]]:
    for stage in range(layout.num_stages - 1):
        (upper, own), (lower, behind) = layout.shape(stage), layout.shape(stage + 1)
        for replica in range(max(upper, lower)):
            for tensor in range(max(own, behind)):
                first = layout.rank(stage, replica % upper, tensor % own)
                yield first, layout.rank(stage + 1, replica % lower, tensor % behind)


_RECORD: Final = TypeAdapter(Cluster)
# A cluster within a record of pydantic's: a string or a record.
ClusterValue = Annotated[Cluster, BeforeValidator(Cluster.of)]


def _check_links(latency_seconds: float, **bandwidths: float | None) -> None:
    for name, value in bandwidths.items():
        if value is not None and not value >= LEAST_BANDWIDTH:
            raise ConfigError(f"{name} must be at least {LEAST_BANDWIDTH} byte per second, got {value!r}")
    if not 0 <= latency_seconds <= MOST_LATENCY_SECONDS:
        raise ConfigError(f"latency_seconds must lie between 0 and {MOST_LATENCY_SECONDS}, got {latency_seconds!r}")
