"""DeepSpeed's PipelineEngine that saves checkpoints: they are whole, or are not there."""

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
from omnibal.engine.resolve import ResolvedRun
from omnibal.engine.saved_files import BASE_WEIGHTS, SavedFile
from omnibal.engine.settings import Settings
from omnibal.engine.table import TableEngine
from omnibal.errors import ConfigError, OmnibalError
from omnibal.families.base import check_frozen
from omnibal.formats.ties import SINGLE_FILE
from omnibal.plan import Plan
from omnibal.ranks import WORK, any_rank, gather, naming_lost_ranks, rank_zero_only, run_on_all_ranks
from omnibal.vlm.weights import check_data

# DeepSpeed's classes, of which its optimizers save objects beside tensors and numbers.
CLASSES: Final = (LossScaler, ZeroStageEnum, fragment_address)


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
        with _explained(self.unfinished):
            return {name: file.result() for name, file in self.files.items()}


class SavingEngine(TableEngine):
    """Saves, all ranks together: a checkpoint gets its name when all of its files are on the disk."""

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
                state_dict = tree_map(_held, state_dict)
            else:  # the file is read for its checksum while DeepSpeed writes the next, and the system has it in memory
                write(state_dict, path)
            save.files[Path(path).name] = pool.submit(look, Path(path), state_dict if async_save else None)

        def look(path: Path, to_write: Any) -> SavedFile:
            if to_write is not None:
                write(to_write, str(path))
            saved_files.flush(path)
            if is_zipfile(path):  # DeepSpeed can be asked for torch's older format, which is checked as it is read
                check_data(path, *CLASSES)
            return SavedFile.of(path, self.global_rank)

        try:
            with _explained(save.unfinished), replaced_methods(self.checkpoint_engine, save=write_and_look):
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
        layout = self.resolved.layout
        return [layout.shape(stage)[0] for stage in range(self.num_stages)] if layout.has_units else self.dp_world_size


@contextmanager
def replaced_methods(checkpoint_engine: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Put functions in the place of methods of DeepSpeed's checkpoint engine, which writes and reads all its files."""
    vars(checkpoint_engine).update(methods)
    try:
        yield
    finally:
        for name in methods:
            delattr(checkpoint_engine, name)


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
