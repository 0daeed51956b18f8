"""DeepSpeed's PipelineEngine whose checkpoints are whole, or are not there."""

import logging
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from zipfile import is_zipfile
from zlib import crc32

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo
from deepspeed.runtime.fp16.loss_scaler import LossScaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor
from torch.utils._pytree import tree_map

from omnibal.engine import saved_files
from omnibal.engine.checkpoint import join_layers, write_model_files
from omnibal.engine.loader import Loader
from omnibal.engine.module import grouping
from omnibal.engine.optimizer_states import SavedStates
from omnibal.engine.resolve import ResolvedRun
from omnibal.engine.saved_files import BASE_WEIGHTS, SavedFile
from omnibal.engine.settings import SettingChange, Settings, renew_rate
from omnibal.engine.table import TableEngine
from omnibal.errors import ConfigError, OmnibalError
from omnibal.families.base import check_frozen
from omnibal.formats.ties import SINGLE_FILE
from omnibal.plan import Plan
from omnibal.ranks import WORK, any_rank, gather, naming_lost_ranks, rank_zero_only, run_on_all_ranks
from omnibal.vlm.weights import check_data, load_data

LOG: Final = logging.getLogger(__name__)
# DeepSpeed's classes, of which its optimizers save objects beside tensors and numbers.
_CLASSES: Final = (LossScaler, ZeroStageEnum, fragment_address)
# Where the optimizer's state lies: under other values each rank reads it by the names of its weights.
_PLACES: Final = ("partition", "num_replicas", "num_tensor", "zero_stage", "grad_accum_dtype")


@dataclass(frozen=True)
class _Save:
    """A checkpoint that has no name yet; threads of this rank write or check the files, by name."""

    unfinished: Path
    is_latest: bool
    keep: int | None
    files: dict[str, Future[SavedFile]] = field(default_factory=dict)

    @property
    def is_written(self) -> bool:
        return all(file.done() for file in self.files.values())

    def written(self) -> dict[str, SavedFile]:
        """What each file is, by name, when all threads are done."""
        with _explained(self.unfinished):
            return {name: file.result() for name, file in self.files.items()}


class CheckpointedEngine(TableEngine):
    """Saves and loads, all ranks together: a checkpoint gets its name when all of its files are on the disk."""

    resolved: ResolvedRun
    spare: Mapping[str, Tensor]
    plan: Plan
    loader: Loader
    settings: Settings
    _saving: _Save | None = None

    @property
    def where(self) -> str:
        return f"rank {self.global_rank}, stage {self.stage_id}"

    @naming_lost_ranks
    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *,
        keep: int | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        async_save: bool = False,
    ) -> None:
        """Save weights, optimizer, learning-rate schedule and the position in the data, all ranks together.

        Args:
            save_dir: Folder of checkpoints, which all ranks share; the new one is a folder in it.
            tag: Its name; by default ``global_step<n>``. An older checkpoint of that name is replaced when the new
                one is complete.
            client_state: What else to save; ``load_checkpoint`` returns it. Data only: containers of tensors, arrays,
                numbers and strings; ``torch.serialization.add_safe_globals`` allows a class of your own.
            keep: Delete all but the newest ``keep`` checkpoints afterwards; by default none is deleted.
            exclude_frozen_parameters: Leave out weights that are not trained. Always so beside adapters, where the
                model's folder holds them.
            async_save: Copy what is saved to the host's memory and return; a thread of each rank writes it while
                training goes on. The checkpoint is whole, and what failed is raised, at the first ``train_batch``
                behind the end of all threads, at the next save, or in ``finish_saving``.
        """
        # 1. Rank 0 makes an unfinished folder beside the others. 2. Every rank writes its files into it, and notes the
        # size and checksum of each. 3. In `finish_saving`, which an asynchronous save leaves to a later step, rank 0
        # gathers these, adds the model's files and the manifest, and gives the folder its name; "latest" comes last. In
        # between ranks wait where nothing times out, and what fails on one rank is raised on all: then rank 0 deletes
        # the unfinished folder.
        self.finish_saving()
        with self._noted_saving():
            self.settle_weights()
            folder, tag = Path(save_dir), f"global_step{self.global_steps}" if tag is None else str(tag)
            tags = gather(tag)
            if len(set(tags)) > 1:
                raise ConfigError(f"tag must be the same on all ranks, got {', '.join(sorted(set(tags)))}")
            unfinished = folder / f"{tag}{saved_files.UNFINISHED}"
            state = {**(client_state or {}), "sampler": self.loader.state_dict()}
            begin = partial(saved_files.begin, folder, tag)
            rank_zero_only(begin, doing=f"makes a folder for checkpoint {tag}", where=self.where)
            exclude_frozen = exclude_frozen_parameters or self.resolved.base is not None
            save = _Save(unfinished, save_latest, keep)
            with self._deleted_if_it_fails(save):
                write = partial(self._write, save, state, exclude_frozen, async_save)
                run_on_all_ranks(write, where=self.where)
            self._saving = save
        if not async_save:
            self.finish_saving()

    @naming_lost_ranks
    def finish_saving(self) -> None:
        """Wait until the checkpoint of an ``async_save`` is whole, if there is one; all ranks together.

        Raises:
            OmnibalError: A file could not be written, on any rank.
        """
        save, self._saving = self._saving, None
        if save is None:
            return
        on_rank_zero = partial(rank_zero_only, where=self.where)
        with self._noted_saving():
            with self._deleted_if_it_fails(save):
                own = run_on_all_ranks(save.written, where=self.where)
                files = {name: saved for of_rank in gather(own) for name, saved in of_rank.items()}
                complete = partial(self._complete, save.unfinished, files, is_latest=save.is_latest)
                on_rank_zero(complete, doing=f"completes checkpoint {save.unfinished.stem}")
            if save.keep is not None:
                delete = partial(saved_files.keep_newest, save.unfinished.parent, save.keep)
                on_rank_zero(delete, doing="deletes old checkpoints")

    @contextmanager
    def _noted_saving(self) -> Iterator[None]:
        with WORK.within(self.global_steps):
            WORK.at("saving of a checkpoint", is_long=True)
            yield

    def _finish_written_save(self) -> None:
        """As ``finish_saving``, if no rank has to wait for its threads."""
        if self._saving is not None and not any_rank(not self._saving.is_written, self.device):
            self.finish_saving()

    @contextmanager
    def _deleted_if_it_fails(self, save: _Save) -> Iterator[None]:
        try:
            yield
        except OmnibalError:  # on all ranks
            wait(save.files.values())
            gather(None, where=self.where)  # behind it no thread of any rank writes into the folder
            if self.global_rank == 0:
                shutil.rmtree(save.unfinished, ignore_errors=True)
            raise

    def _write(self, save: _Save, state: dict[str, Any], exclude_frozen: bool, async_save: bool) -> None:
        """Write this rank's files, or let a thread write copies."""
        folder, name = str(save.unfinished.parent), save.unfinished.name
        write = self.checkpoint_engine.save
        pool = ThreadPoolExecutor(1 if async_save else saved_files.READERS)

        def write_and_look(state_dict: Any, path: str) -> None:
            if async_save:
                save.files[Path(path).name] = pool.submit(write_all, tree_map(_held, state_dict), path)
                return
            # A file is read for its checksum while DeepSpeed writes the next, and while the system has it in memory.
            write(state_dict, path)
            save.files[Path(path).name] = pool.submit(look, Path(path))

        def write_all(state_dict: Any, path: str) -> SavedFile:
            write(state_dict, path)
            return look(Path(path))

        def look(path: Path) -> SavedFile:
            saved_files.flush(path)
            if is_zipfile(path):  # DeepSpeed can be asked for torch's older format, which is checked as it is read
                check_data(path, *_CLASSES)
            return SavedFile.of(path, self.global_rank)

        try:
            with _explained(save.unfinished), _replaced(self.checkpoint_engine, save=write_and_look):
                # What DeepSpeedEngine.save_checkpoint does on each rank, without its barriers, which time out while a
                # rank writes, and without its file "latest". _save_checkpoint writes this rank's share of the layers
                # and, on the ranks that DeepSpeed chooses, the engine's state; _save_zero_checkpoint a part of the
                # optimizer's.
                info = CheckpointCommitInfo(tag=name, save_dir=folder, save_latest=False)
                self.checkpoint_engine.create(info)
                self._save_checkpoint(folder, name, client_state=state, exclude_frozen_parameters=exclude_frozen)
                if self.save_zero_checkpoint:
                    self._save_zero_checkpoint(folder, name)
                self.checkpoint_engine.commit(info)
        finally:
            pool.shutdown(wait=False)

    def _complete(self, unfinished: Path, files: dict[str, SavedFile], *, is_latest: bool) -> None:
        with _explained(unfinished):
            for path in write_model_files(unfinished, self.resolved, self.spare):
                saved_files.flush(path)
                files[str(path.relative_to(unfinished))] = SavedFile.of(path, 0)
            layout = {**self._layout(), "settings": self.settings.record()}
            saved_files.write_manifest(unfinished, layout, files)
            saved_files.finish(unfinished, is_latest=is_latest)

    @naming_lost_ranks
    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        *,
        fall_back: bool = False,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Go on exactly where a checkpoint was saved, also in another layout, with other ZeRO or micro-batches.

        Args:
            tag: Name of the checkpoint; by default the newest one goes on.
            fall_back: Where the newest one is not whole, take the newest that is, with a warning.
            load_module_strict: Whether the checkpoint must have all weights of the model, and no other.
            load_optimizer_states: Whether the optimizer goes on, too; where not, it may be another one.

        Returns:
            The checkpoint's path, and the ``client_state`` it was saved with.
        """
        self.finish_saving()
        self.settle_weights()
        folder = Path(load_dir)
        name = self._choose(folder, None if tag is None else str(tag), fall_back=fall_back)
        with_optimizer = load_optimizer_states and not load_module_only
        with_schedule = load_lr_scheduler_states and not load_module_only
        layout = self._layout(with_optimizer=with_optimizer, with_schedule=with_schedule)
        manifest = saved_files.read_manifest(folder / name)
        moved = [SettingChange(key, manifest.get(key), layout.get(key)) for key in _PLACES]
        moved = [change for change in moved if change.saved != change.value]
        # DeepSpeedEngine.load_checkpoint communicates: what can fail on one rank only has to fail before.
        check = partial(self._check_readable, folder / name, layout, strict=load_module_strict)
        position, states = run_on_all_ranks(lambda: check(with_optimizer, bool(moved)), where=self.where)
        saved = manifest.get("settings")
        compare = partial(self.settings.changed_from, with_optimizer=with_optimizer, with_schedule=with_schedule)
        run_on_all_ranks(lambda: saved is None or compare(saved), where=self.where)
        run_on_all_ranks(lambda: self.loader.load_state_dict(position), where=self.where)
        rates = [group["lr"] for group in self.basic_optimizer.param_groups]
        # BF16_Optimizer's state is saved like ZeRO's, in files of its own (_save_zero_checkpoint), but load_checkpoint
        # looks for such files under ZeRO only.
        apart = self.using_bf16_optimizer and not self.zero_optimization()
        by_deepspeed = with_optimizer and states is None
        with _replaced(self.checkpoint_engine, load=_load):
            path, state = super().load_checkpoint(
                str(load_dir),
                name,
                load_module_strict=load_module_strict and self.resolved.base is None,
                load_optimizer_states=by_deepspeed and not apart,
                load_lr_scheduler_states=load_lr_scheduler_states,
                load_module_only=load_module_only,
            )
            if apart and by_deepspeed:
                self._load_zero_checkpoint(str(load_dir), name)
        if apart and not by_deepspeed:
            self.optimizer.refresh_fp32_params()  # its float32 copies are still those of the weights before
        if states is not None:
            states.load(self)
        if with_schedule:
            self._recount_steps()
        self._renew(saved, rates, with_optimizer=with_optimizer, with_schedule=with_schedule)
        changed = moved + ([] if saved is None else compare(saved))  # with the steps of the schedule, counted anew
        if self.global_rank == 0 and (changed or saved is None):
            what = f"other settings: {', '.join(map(str, changed))}"
            if saved is None:
                what = "the optimizer's settings that it was saved with: an older omnibal kept no others to compare"
            LOG.warning("going on from %s with %s", folder / name, what)
        # DeepSpeedEngine returns every key of the engine's file that it has not read itself; the optimizer's and the
        # sampler's are taken out, and the caller's own are left.
        for key in ("optimizer", "sampler"):
            state.pop(key, None)
        return path, state

    def _recount_steps(self) -> None:
        """Let a schedule over ``"auto"`` steps end with the run: steps of another size come behind those done."""
        asked = self.resolved.config.get("scheduler", {}).get("params", {}).get("total_num_steps")
        run = self.resolved.section.run
        if asked == "auto" and run.max_steps is None:
            total = self.global_steps + self.loader.steps_left(run.epochs)
            self.lr_scheduler.total_num_steps = self.settings.keys["scheduler.params.total_num_steps"] = total

    def _renew(
        self, saved: dict[str, Any] | None, rates: list[float], *, with_optimizer: bool, with_schedule: bool
    ) -> None:
        """Let the settings of this run hold where loading has brought back those of the checkpoint."""
        # DeepSpeed's optimizers clip by this attribute, and load_state_dict puts the saved value there.
        if hasattr(self.optimizer, "clip_grad"):
            self.optimizer.clip_grad = self.gradient_clipping()
        if saved is not None and with_optimizer:
            self.settings.renew_optimizer(self.basic_optimizer, saved)
        if self.lr_scheduler is None:
            return
        if with_schedule:
            if saved is not None:
                self.settings.renew_schedule(self.lr_scheduler, saved)
            renew_rate(self.lr_scheduler)
        else:  # it begins anew
            for group, rate in zip(self.basic_optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _choose(self, folder: Path, tag: str | None, *, fall_back: bool) -> str:
        """The name of the checkpoint to go on from."""
        # Rank 0 chooses one by the sizes of its files, and every rank reads the files that it wrote, and some of ranks
        # that there are no more. If a byte of them differs, rank 0 chooses again, without that checkpoint.
        damaged: dict[str, str] = {}
        readers = range(dist.get_world_size())

        def check(checkpoint: Path) -> str | None:
            return damaged.get(checkpoint.name) or saved_files.has_all_files(checkpoint)

        while True:
            choose = partial(saved_files.choose, folder, tag, fall_back=fall_back, check=check)
            name, remark = rank_zero_only(choose, doing="looks for a whole checkpoint", where=self.where)
            own = partial(
                saved_files.problem_of,
                folder / name,
                lambda file, saved: (
                    (saved.rank if saved.rank in readers else crc32(file.encode()) % len(readers)) == self.global_rank
                ),
            )
            problems = gather(run_on_all_ranks(own, where=self.where))
            problem = next((found for found in problems if found is not None), None)
            if problem is None:
                if remark and self.global_rank == 0:
                    LOG.warning(remark)
                return name
            damaged[name] = problem

    @naming_lost_ranks
    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = SINGLE_FILE, exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the model as a Hugging Face folder, in the type that it trains in, all ranks together.

        All stages write to ``save_dir``. The other two arguments are DeepSpeed's, and must be as they are.
        """
        if save_filename != SINGLE_FILE:
            raise ConfigError(f"save_filename must be {SINGLE_FILE!r}, got {save_filename!r}")
        if exclude_frozen_parameters:
            raise ConfigError("exclude_frozen_parameters must be False for a model that can be loaded, got True")
        self.settle_weights()
        folder, layers = Path(save_dir), Path(save_dir) / "layers"
        write = partial(self.module.save_state_dict, layers, self.checkpoint_engine)
        run_on_all_ranks(write, where=self.where)

        def join() -> None:
            write_model_files(layers, self.resolved, self.spare)
            join_layers(layers, folder, merged=True)
            shutil.rmtree(layers)

        rank_zero_only(join, doing=f"joins the layers of {folder}", where=self.where)
        return True

    def _layout(self, *, with_optimizer: bool = True, with_schedule: bool = True) -> dict[str, Any]:
        """What a run must share with a checkpoint to go on from it."""
        lora = self.resolved.section.model.lora
        optimizer = {
            "frozen": list(check_frozen(self.resolved.vlm.records, self.resolved.section.model.frozen)),
            "lora": lora and lora.model_dump(exclude={"dropout"}),
            "optimizer": type(self.basic_optimizer).__name__,
            "parameter_groups": grouping(self.resolved.section.optimizer),
        }
        schedule = {"scheduler": None if self.lr_scheduler is None else type(self.lr_scheduler).__name__}
        weights = {
            "partition": list(self.plan.partition.boundaries),
            "num_replicas": self._replicas(),
            "num_tensor": self.resolved.layout.num_tensor,
            "encoder": "spread" if self.resolved.layout.is_spread else None,
            "zero_stage": int(self.zero_optimization_stage()),
            "dtype": str(self.resolved.dtype),
            # which of DeepSpeed's optimizers holds the float32 copies of the weights
            **({"grad_accum_dtype": str(self.get_data_types()[1])} if self.bfloat16_enabled() else {}),
            # the weights that adapters are trained beside
            **({} if self.resolved.base is None else {BASE_WEIGHTS: saved_files.fingerprint(self.resolved.base)}),
        }
        # What is frozen comes first, since a partition may follow from it.
        return (optimizer if with_optimizer else {}) | (schedule if with_schedule else {}) | weights

    def _replicas(self) -> int | list[int]:
        """Replicas of the run; of each stage where they differ."""
        layout = self.resolved.layout
        return [layout.shape(stage)[0] for stage in range(self.num_stages)] if layout.has_units else self.dp_world_size

    def _check_readable(
        self, checkpoint: Path, layout: dict[str, Any], with_optimizer: bool, is_moved: bool, *, strict: bool
    ) -> tuple[dict[str, Any], SavedStates | None]:
        """Open what this rank will load; the weights must be those of its layers.

        The result is the position in the data, and the optimizer's state if that ``is_moved`` or has its groups in
        another order: DeepSpeed reads it only where this rank wrote it.
        """
        saved = saved_files.read_manifest(checkpoint)
        for key, value in layout.items():  # or optimizer states would land on other layers
            before = saved.get(key)
            if before != value and key not in _PLACES:
                raise ConfigError(
                    f"{key} must be that of the checkpoint {checkpoint} ({before}) to resume, got {value}; "
                    "to go on under another one, export the checkpoint and start from the exported model"
                )
        by_name = is_moved
        if with_optimizer:
            has_order = self.settings.check_groups(
                saved.get("settings"), by_name=is_moved, with_schedule="scheduler" in layout
            )
            by_name = is_moved or not has_order
        # What load_checkpoint reads on this rank: the engine's file, this rank's part of the optimizer's state, and the
        # files of its stage's layers.
        folder, name = str(checkpoint.parent), checkpoint.name
        engines = self._get_all_ckpt_names(folder, name)
        # SDLoaderBase.load takes the first file where there are others than stages.
        of_engine = self._get_ckpt_name(folder, name) if len(engines) == self.mp_world_size else engines[0]
        position = deepcopy(_opened(Path(of_engine))["sampler"])  # the file is mapped
        states = None
        if with_optimizer and by_name:
            states = self._states_of(checkpoint, saved)
        elif with_optimizer and self.save_zero_checkpoint:
            _opened(Path(self._get_zero_ckpt_name(folder, name)))
        self._check_layers(checkpoint, strict=strict)
        return position, states

    def _states_of(self, checkpoint: Path, manifest: Mapping[str, Any]) -> SavedStates:
        """The optimizer's state of this rank's layers, where other ranks wrote it."""
        if self.zero_round_robin_gradients():  # _link_all_hp_params does not know the order in the flat buffers then
            raise ConfigError(
                "zero_optimization.round_robin_gradients must be false to go on with other stages, replicas or ZeRO, "
                "got true; DeepSpeed's files then do not say where weights lie"
            )
        layers = [index for index, _ in self.module.numbered_layers()]
        states = SavedStates(checkpoint, manifest, layers, self.module.vlm, _opened, self.module.ranks)
        states.check(self)
        return states

    def _check_layers(self, checkpoint: Path, *, strict: bool) -> None:
        """Open the files of this rank's layers, which must have their weights."""
        for index, layer in self.module.numbered_layers():
            expected = {name: tensor.shape for name, tensor in layer.state_dict().items()}
            in_folder = set()  # weights beside adapters, which a checkpoint leaves to the model's folder
            if self.resolved.base is not None:
                in_folder = {name for name, parameter in layer.named_parameters() if not parameter.requires_grad}
            saved = self.module.saved_state(checkpoint, index, _opened_without_numbers)
            found = {name: tensor.shape for name, tensor in saved.items()}
            differing = {name for name, _ in found.items() ^ expected.items()} - (in_folder - found.keys())
            if not strict:
                differing &= found.keys() & expected.keys()
            if differing:
                raise ConfigError(
                    f"checkpoint must be of a model with the same weights, got layer {index} of {checkpoint} with "
                    f"other {', '.join(sorted(differing)[:3])}"
                )


@contextmanager
def _replaced(checkpoint_engine: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Put functions in the place of methods of DeepSpeed's checkpoint engine, which writes and reads all its files."""
    vars(checkpoint_engine).update(methods)
    try:
        yield
    finally:
        for name in methods:
            delattr(checkpoint_engine, name)


def _load(path: Any, map_location: Any = None) -> Any:
    # TorchCheckpointEngine.load unpickles whatever a file holds; this reads data only.
    return load_data(path, *_CLASSES, map_location=map_location)


def _held(value: Any) -> Any:
    """A copy that training does not change; a tensor's lies in the host's memory."""
    # DeepSpeed's clone_tensors_for_torch_save would share arrays with the caller.
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else deepcopy(value)


@contextmanager
def _explained(unfinished: Path) -> Iterator[None]:
    """Let what fails while a checkpoint is written say so; a torch that meets a full disk does not."""
    try:
        yield
    except OmnibalError:
        raise
    except Exception as error:
        there = next(each for each in unfinished.absolute().parents if each.is_dir())  # folders may have vanished
        free = shutil.disk_usage(there).free / 2**20
        first_line = (str(error).splitlines() or [""])[0]  # torch adds its stack
        raise OmnibalError(
            f"checkpoint {unfinished.stem} must be written completely, got {type(error).__name__}: {first_line} "
            f"({free:.0f} MiB are free in {there}); older checkpoints are as they were"
        ) from error


def _opened(path: Path) -> Any:
    """What a file holds; tensors are mapped, not read."""
    try:
        return load_data(path, *_CLASSES, map_location="cpu", mmap=is_zipfile(path))
    except Exception as error:
        others = saved_files.offer(path.parent.parent, path.parent.name, saved_files.has_all_files)
        raise ConfigError(
            f"checkpoint must be readable, got {path}: {type(error).__name__}: {error}{others}"
        ) from error


def _opened_without_numbers(path: Path) -> dict[str, Tensor]:
    return {name: tensor.to("meta") for name, tensor in _opened(path).items()}
