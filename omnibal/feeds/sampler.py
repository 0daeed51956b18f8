"""BalancedBatchSampler: any DataLoader's batch_sampler, with balanced packs as its batches."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Final, Self, Unpack
from warnings import warn

from pydantic import Field, NonNegativeInt, PositiveInt, ValidationError

from omnibal.data.epoch import Arrangement, Epoch, Step, arrange
from omnibal.data.lengths import SampleLengths
from omnibal.data.limits import PackLimits
from omnibal.data.mixed_packs import Origin
from omnibal.data.packing_spec import OF, PackingOptions, PackingSpec, Ranks, in_words
from omnibal.data.packs import Packs
from omnibal.errors import ConfigError, integer
from omnibal.records import Record, explain

VERSION: Final = 1  # of the form of saved positions
OTHER_DATA: Final = "; other samples or shares make other draws: keep the weights, and begin anew without the state"
OTHER_SPEC: Final = "; give the sampler what it was saved with, or begin anew without the state"
MOST_SHOWN: Final = 200
_Shape = Annotated[list[PositiveInt], Field(min_length=2, max_length=2)]  # ranks, and micro-batches of each


class _OriginRecord(Record):
    epoch: NonNegativeInt
    step: NonNegativeInt
    units: list[NonNegativeInt]


class _EpochRecord(Record):
    arranged_for: _Shape
    ranks: _Shape
    packs_done: Annotated[list[NonNegativeInt], Field(min_length=1, max_length=1)]
    first_step: NonNegativeInt
    origin: _OriginRecord | None = None


class _State(Record):
    version: int
    epoch: NonNegativeInt
    steps_done: NonNegativeInt
    epoch_steps: _EpochRecord
    next_packs: list[list[int]]
    made_from: dict[str, Any]


class BalancedBatchSampler:
    """Yields the sample indices of this rank's micro-batches, on all ranks equally many.

    Pass it to a DataLoader as ``batch_sampler`` and call ``set_epoch`` before every epoch, unless the host does:
    Lightning, Fabric, Accelerate and Trainer do. A second pass over an epoch without ``set_epoch`` warns. Every rank
    has its own packs: a host must not deal them to its ranks again. All ranks must be given equal arguments, ``rank``
    aside: ``verify`` checks that they were. An empty list stands for a micro-batch without a sample; it is possible in
    the last step only.

    Under ``"balanced"`` all epochs have equally many steps, and a micro-batch is empty only where there are fewer
    samples than packs. Under ``"isf"`` and ``"random"`` every epoch has the steps that its packs fill: the length
    follows ``set_epoch``, and ``steps_of`` tells that of any epoch, to sum them for a learning-rate schedule.

    Args:
        lengths: Loads of every sample; a sample's index is its position here.
        limits: The most a pack may hold.
        num_replicas: Data-parallel ranks.
        rank: This process's data-parallel rank.
        micro_batches: Packs per rank and step (gradient accumulation steps).
        **options: Other fields of a ``PackingSpec``: ``method``, ``seed``, ``oversized``, ``cost``,
            ``exchange_steps``, ``iterations``, and ``mixture``, under which an epoch is no pass over the data but a
            part of an endless row of steps, of as many as hold about as many samples as there are.

    Attributes:
        epoch: The current epoch.
        num_steps: Steps of the current epoch, all of it; the same in all epochs under ``"balanced"``.
        steps_done: Where iterating the current epoch begins: above 0 after ``load_state_dict``.
        epoch_steps: Where it ends: ``num_steps``, but in an epoch that other ranks began.

    Raises:
        ConfigError: An argument is out of range.
        DataError: ``oversized`` is ``"error"`` and there is such a sample, or ``"drop"`` and there is no other.

    >>> lengths = SampleLengths([1, 3, 5, 4, 1], [300, 800, 1400, 1100, 300])
    >>> limits = PackLimits(9, 4096)
    >>> ranks = [BalancedBatchSampler(lengths, limits, num_replicas=2, rank=rank) for rank in range(2)]
    >>> [len(sampler) for sampler in ranks], sorted(sample for sampler in ranks for pack in sampler for sample in pack)
    ([1, 1], [0, 1, 2, 3, 4])
    """

    def __init__(
        self,
        lengths: SampleLengths,
        limits: PackLimits,
        *,
        num_replicas: int,
        rank: int,
        micro_batches: int = 1,
        **options: Unpack[PackingOptions],
    ) -> None:
        self._spec = PackingSpec(lengths, limits, **options)  # type: ignore[arg-type]  # a mapping becomes a mixture
        self._ranks = Ranks(num_replicas, micro_batches)
        self._origin: Origin | None = None  # of the epochs to come, if other ranks began a mixture
        # Arranged once for each ranks that begin epochs; copies of the sampler, which read ahead, share this.
        self._arranged: dict[tuple[Ranks, Origin | None], Arrangement] = {}
        self._newest: dict[tuple[int, Ranks, Origin | None], Epoch] = {}
        self._epoch = self._begin(0)
        self.lengths = lengths
        self.mixture = self._spec.mixture
        self.limits = limits
        self.num_replicas = self._ranks.num_replicas
        self.micro_batches = self._ranks.micro_batches
        self.rank = integer("rank", rank, 0, self.num_replicas - 1)
        self.steps_done = 0
        self._steps_yielded = 0
        self._exhausted = False
        self._is_told, self._has_warned = True, False  # told: the host has asked for the pass that comes next

    @property
    def sampler(self) -> Self:
        """The batch sampler itself: Lightning, Fabric and ignite tell the epoch to a batch sampler's sampler."""
        return self

    @property
    def epoch(self) -> int:
        return self._epoch.epoch

    @property
    def num_steps(self) -> int:
        """Steps of the current epoch, were it begun by the ranks there are now."""
        return self.steps_of(self.epoch)

    @property
    def epoch_steps(self) -> int:
        """Steps that are done when the current epoch is."""
        return self._epoch.last_step

    @property
    def oversized_report(self) -> str:
        """How many samples exceed a limit on their own, which, and what becomes of them."""
        return self._spec.oversized_report()

    def __len__(self) -> int:
        """Micro-batches of the current epoch: the same on all ranks, and under ``"balanced"`` in all epochs."""
        return self.num_steps * self.micro_batches

    def steps_of(self, epoch: int) -> int:
        """Steps of an epoch begun by the ranks there are now.

        Under ``"isf"`` and ``"random"`` the epoch is planned to count them, once: tenths of a second for a million
        samples. Under ``"balanced"`` they are known.
        """
        return self._resume(integer("epoch", epoch, 0), self._ranks, None).num_steps

    def _begin(self, epoch: int) -> Epoch:
        """An epoch from its beginning; the newest one is kept, since whoever reads ahead begins it first."""
        key = epoch, self._ranks, self._origin
        if key not in self._newest:
            begun = self._resume(epoch, self._ranks, self._origin)
            self._newest.clear()
            self._newest[key] = begun
        return self._newest[key]

    def _resume(self, epoch: int, begun_by: Ranks, origin: Origin | None, **position: Any) -> Epoch:
        """An epoch from the position where its ranks, or others, left it."""
        if (begun_by, origin) not in self._arranged:
            self._arranged[begun_by, origin] = arrange(self._spec, begun_by, origin)
        ranks = position.pop("ranks", begun_by)
        arranged = self._arranged[begun_by, origin]
        return Epoch(self._spec, arranged, epoch, ranks, begun_by=begun_by, origin=origin, **position)

    def __iter__(self) -> Iterator[list[int]]:
        # The sampler does not count passes itself. A pass may be a second look at the same epoch, as of a loader that
        # counts tokens first or of ignite, which lists an epoch's batches; it may be made on one rank alone, whose
        # packs would no longer be those of the others' epoch; and a saved position must name the epoch that the host
        # resumes. A repeated epoch loses no sample, so that a warning suffices.
        if not self._is_told and not self._has_warned:
            warn(
                f"set_epoch must be called before every pass over the packs, got another pass over epoch {self.epoch} "
                f"without it: its packs are the same once more; call batch_sampler.set_epoch({self.epoch + 1}) for the "
                "next epoch",
                stacklevel=2,
            )
            self._has_warned = True
        if self._exhausted:  # the same epoch once more, also where it was resumed in its middle
            self._go_to(self._begin(self.epoch))
        # A step counts as yielded with its last pack: a state in between begins the step anew.
        for index in range(self.steps_done, self._epoch.last_step):
            packs = self.step_packs(index)
            for micro_batch in range(self.micro_batches):
                if micro_batch == self.micro_batches - 1:
                    self._steps_yielded = index + 1
                    self._is_told &= index + 1 < self._epoch.last_step
                yield packs[self.rank * self.micro_batches + micro_batch].tolist()
        self._exhausted = True

    def steps(self) -> Iterator[Step]:
        """The steps of the current epoch from ``steps_done`` on, with the packs of all ranks."""
        epoch = self._epoch
        return (epoch.step(index) for index in range(self.steps_done, epoch.last_step))

    def step(self, index: int) -> Step:
        """One step of the current epoch, with the packs of all ranks.

        Raises:
            ConfigError: The epoch has no such step, or other ranks did it.
        """
        return self._epoch.step(index)

    def step_packs(self, index: int) -> Packs:
        """The packs of a step of the current epoch, rank after rank; those asked for last are kept."""
        return self._epoch.step_packs(index)

    def step_without(self, index: int, samples: Collection[int]) -> Step:
        """A step of the current epoch as it is without some samples, which cannot be read."""
        packs = self.step_packs(index)
        left = packs.without([*samples])
        return replace(self._epoch.step_of(index, left), left_out=len(packs.samples) - len(left.samples))

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; where it is the current one, stay where ``load_state_dict`` went."""
        epoch = integer("epoch", epoch, 0)
        self._is_told = True
        if epoch != self.epoch:
            self._go_to(self._begin(epoch))

    def _go_to(self, epoch: Epoch, steps_done: int = 0) -> None:
        self._epoch = epoch
        self._exhausted, self._is_told = False, True
        self.steps_done = self._steps_yielded = steps_done

    def state_dict(self, steps_done: int | None = None) -> dict[str, Any]:
        """The position behind ``steps_done`` steps of the current epoch, as a few JSON values.

        Args:
            steps_done: Steps of the current epoch that were trained, those before a resume included. By default
                those that were yielded: too many where a DataLoader prefetches.

        Raises:
            ConfigError: ``steps_done`` is not a step of the current epoch, or lies before the resume.
        """
        done = self._steps_yielded if steps_done is None else steps_done
        done = integer("steps_done", done, self._epoch.first_step, self._epoch.last_step)
        return {
            "version": VERSION,
            "epoch": self.epoch,
            "steps_done": done,
            "epoch_steps": self._epoch.record(),
            "next_packs": [self._epoch.next_pack(done)],
            "made_from": self._spec.fingerprint(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, also one of another number of ranks, micro-batches or workers.

        Where the ranks are the same, the steps are those that would have followed. Otherwise the epoch's remaining
        packs are dealt to the ranks there are now: no sample is lost or repeated, and ``epoch_steps`` says where the
        epoch ends. Later epochs are arranged for the ranks there are now. Fabric and Accelerate count epochs from 0
        again in a new process: tell Accelerate's loader the epoch (``loader.set_epoch``), and iterate the DataLoader
        itself under Fabric.

        Raises:
            ConfigError: The state was saved with another spec (lengths, limits, method, seed, …), or this version
                arranges epochs differently.
        """
        saved = _read_state(state, self._spec.fingerprint())
        position, done = saved.epoch_steps, saved.steps_done
        left = position.origin
        origin = None if left is None else Origin(left.epoch, left.step, tuple(left.units))
        arranged_for, ranks = Ranks(*position.arranged_for), Ranks(*position.ranks)
        # First the position of those who saved; then, for other ranks, the same packs cut into steps of their own.
        (packs_done,) = position.packs_done
        begun = saved.epoch, arranged_for, origin
        epoch = self._resume(*begun, ranks=ranks, packs_done=packs_done, first_step=position.first_step)
        if ranks != self._ranks:  # the ranks there are now go on behind the packs that the others have done
            epoch = self._resume(*begun, ranks=self._ranks, packs_done=epoch.packs_done(done), first_step=done)
        found = [epoch.next_pack(done)]
        if found != saved.next_packs:
            raise ConfigError(
                f"the next packs must be those of the saved state, {saved.next_packs}, got {found}; "
                "this version of omnibal arranges epochs differently: finish the epoch with the one that saved it"
            )
        self._origin = origin if arranged_for == self._ranks else epoch.origin_behind()
        self._go_to(epoch, done)

    def verify(self, gather: Callable[[dict[str, Any]], Sequence[Mapping[str, Any]]]) -> None:
        """Check that all ranks hold the same plan: lengths, limits, seed and all else, at the same position.

        Args:
            gather: Returns the mappings that all processes passed, on every process. With torch::

                def gather(record):
                    records = [None] * dist.get_world_size()
                    dist.all_gather_object(records, record)
                    return records

        Raises:
            ConfigError: On all ranks alike, naming the rank and the field that differ.
        """
        record = {
            "rank": self.rank,
            "num_replicas": self.num_replicas,
            "micro_batches": self.micro_batches,
            **self._spec.fingerprint(),
            "epoch": self.epoch,
            "steps_done": self.steps_done,
            "epoch_steps": self._epoch.record(),
        }
        check_agreement(gather(record), num_replicas=self.num_replicas)


def _read_state(state: Any, made_from: Mapping[str, Any]) -> _State:
    """A state, refused where it is none of this version, or was made from something else."""
    found = state.get("version") if isinstance(state, Mapping) else type(state).__name__
    if found != VERSION:
        raise ConfigError(f"state must be of version {VERSION}, as state_dict() gave it, got {found!r}")
    try:
        read = _State.model_validate(dict(state))
    except ValidationError as error:
        raise ConfigError(f"{explain(_State, error, 'state')}; pass it as state_dict() gave it") from error
    for name, value in made_from.items():
        saved = read.made_from.get(name)
        if saved != value:
            remedy = OTHER_DATA if name in ("num_samples", "content_hash", "mixture") else OTHER_SPEC
            of, texts = OF.get(name, ""), [in_words(name, each)[:MOST_SHOWN] for each in (saved, value)]
            raise ConfigError(f"{name}{of} must be as in the saved state, {texts[0]}, got {texts[1]}{remedy}")
    return read


def check_agreement(records: Sequence[Mapping[str, Any]], *, num_replicas: int) -> None:
    """Compare what every process holds.

    Args:
        records: One mapping per process, all with the same keys; ``rank`` is its data-parallel rank, everything else
            must be equal. Several processes may share a rank (the stages of a pipeline).

    >>> check_agreement([{"rank": 0, "seed": 1}, {"rank": 1, "seed": 2}], num_replicas=2)
    Traceback (most recent call last):
    omnibal.errors.ConfigError: rank 1: seed must be the same on all ranks, got 2 where rank 0 has 1
    """
    first = records[0]
    for record in records[1:]:
        for name, value in first.items():
            if name != "rank" and record.get(name) != value:
                raise ConfigError(
                    f"rank {record['rank']}: {name} must be the same on all ranks, got {record.get(name)!r} "
                    f"where rank {first['rank']} has {value!r}"
                )
    ranks = {record["rank"] for record in records}
    missing = sorted(set(range(num_replicas)) - ranks)
    if missing:
        raise ConfigError(
            f"ranks must be 0 … {num_replicas - 1}, each on at least one process, got {sorted(ranks)}; "
            f"{', '.join(map(str, missing))} missing: pass every process its own data-parallel rank"
        )
