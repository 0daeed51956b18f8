"""DeepSpeed's PipelineEngine with checkpoints, each whole or not there, that go on exactly, also in other layouts."""

import logging
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final
from zlib import crc32

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map

from omnibal.engine import checkpoint as checkpoints
from omnibal.engine.checkpoint import BASE_WEIGHTS, SavedFile
from omnibal.engine.grid import replaced
from omnibal.engine.loader import Loader
from omnibal.engine.module import grouping
from omnibal.engine.resolve import ResolvedRun
from omnibal.engine.saved_states import CLASSES, SavedStates, check_layers, opened
from omnibal.engine.settings import SettingChange, Settings, renew_rate
from omnibal.engine.table import TableEngine
from omnibal.errors import ConfigError, OmnibalError
from omnibal.families.base import check_frozen
from omnibal.plan import Plan
from omnibal.ranks import any_rank, gather, rank_zero_only, run_on_all_ranks
from omnibal.ranks.failures import naming_lost_ranks
from omnibal.ranks.watchdog import WORK
from omnibal.vlm.weights import check_data, load_data

LOG: Final = logging.getLogger(__name__)
# Where the optimizer's state lies: under other values each rank reads it by the names of its weights.
_STATE_LAYOUT: Final = ("partition", "num_replicas", "num_tensor", "zero_stage", "grad_accum_dtype")


@dataclass(frozen=True)
class _Save:
    """A checkpoint that has no name yet; threads of this rank write or check the files, by name."""

    unfinished: Path
    keep: int | None
    files: dict[str, Future[SavedFile]] = field(default_factory=dict)

    def written(self) -> dict[str, SavedFile]:
        with _explained(self.unfinished):
            return {name: file.result() for name, file in self.files.items()}


class CheckpointedEngine(TableEngine):
    """Saves checkpoints and goes on from them, all ranks together, also in another layout."""

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
            async_save: Copy what is saved to the host's memory and return; a thread of each rank writes it while
                training goes on. The checkpoint is whole, and what failed is raised, at the first ``train_batch``
                behind the end of all threads, at the next save, or in ``finish_saving``.
        """
        # 1. Rank 0 makes an unfinished folder beside the others. 2. Every rank writes its files into it, and notes the
        # size and checksum of each. 3. In `finish_saving`, which an asynchronous save leaves to a later step, rank 0
        # gathers these, adds the model's files and the manifest, and gives the folder its name. In between ranks wait
        # where nothing times out, and what fails on one rank is raised on all: then rank 0 deletes the unfinished
        # folder.
        self.finish_saving()
        with self._noted_saving():
            self.settle_weights()
            folder, tag = Path(save_dir), f"global_step{self.global_steps}" if tag is None else str(tag)
            tags = gather(tag)
            if len(set(tags)) > 1:
                raise ConfigError(f"tag must be the same on all ranks, got {', '.join(sorted(set(tags)))}")
            state = {**(client_state or {}), "sampler": self.loader.state_dict()}
            begin = partial(checkpoints.begin, folder, tag)
            rank_zero_only(begin, doing=f"makes a folder for checkpoint {tag}", where=self.where)
            save = _Save(folder / f"{tag}{checkpoints.UNFINISHED}", keep)
            with self._deleted_if_it_fails(save):
                run_on_all_ranks(partial(self._write, save, state, async_save), where=self.where)
            self._saving = save
        if not async_save:
            self.finish_saving()

    @naming_lost_ranks
    def finish_saving(self) -> None:
        """Wait until the checkpoint of an ``async_save`` is whole, if there is one; all ranks together."""
        save, self._saving = self._saving, None
        if save is None:
            return
        on_rank_zero = partial(rank_zero_only, where=self.where)
        with self._noted_saving():
            with self._deleted_if_it_fails(save):
                own = run_on_all_ranks(save.written, where=self.where)
                files = {name: saved for of_rank in gather(own) for name, saved in of_rank.items()}
                complete = partial(self._complete, save.unfinished, files)
                on_rank_zero(complete, doing=f"completes checkpoint {save.unfinished.stem}")
            if save.keep is not None:
                delete = partial(checkpoints.keep_newest, save.unfinished.parent, save.keep)
                on_rank_zero(delete, doing="deletes old checkpoints")

    @contextmanager
    def _noted_saving(self) -> Iterator[None]:
        with WORK.within(self.global_steps):
            WORK.at("saving of a checkpoint", is_long=True)
            yield

    def _finish_written_save(self) -> None:
        """As ``finish_saving``, if no rank has to wait for its threads."""
        save = self._saving
        if save is not None and not any_rank(not all(file.done() for file in save.files.values()), self.device):
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

    def _write(self, save: _Save, state: dict[str, Any], async_save: bool) -> None:
        folder, name = str(save.unfinished.parent), save.unfinished.name
        write = self.checkpoint_engine.save
        pool = ThreadPoolExecutor(1 if async_save else checkpoints.READERS)

        def write_and_look(state_dict: Any, path: str) -> None:
            if async_save:
                state_dict = tree_map(_held, state_dict)
            else:  # the file is read for its checksum while DeepSpeed writes the next, and the system has it in memory
                write(state_dict, path)
            save.files[Path(path).name] = pool.submit(look, Path(path), state_dict if async_save else None)

        def look(path: Path, to_write: Any) -> SavedFile:
            if to_write is not None:
                write(to_write, str(path))
            checkpoints.flush(path)
            check_data(path, *CLASSES)
            return SavedFile.of(path, self.global_rank)

        try:
            # DeepSpeed's checkpoint engine writes and reads all files of a checkpoint.
            with _explained(save.unfinished), replaced(self.checkpoint_engine, save=write_and_look):
                # What DeepSpeedEngine.save_checkpoint does on each rank, without its barriers, which time out while a
                # rank writes, and without its file "latest". _save_checkpoint writes this rank's share of the layers
                # and, on the ranks that DeepSpeed chooses, the engine's state; _save_zero_checkpoint a part of the
                # optimizer's.
                # Beside adapters, the model's folder holds the weights that are not trained.
                has_base = self.resolved.base is not None
                self._save_checkpoint(folder, name, client_state=state, exclude_frozen_parameters=has_base)
                if self.save_zero_checkpoint:
                    self._save_zero_checkpoint(folder, name)
        finally:
            pool.shutdown(wait=False)

    def _complete(self, unfinished: Path, files: dict[str, SavedFile]) -> None:
        with _explained(unfinished):
            for path in checkpoints.write_model_files(unfinished, self.resolved, self.spare):
                checkpoints.flush(path)
                files[str(path.relative_to(unfinished))] = SavedFile.of(path, 0)
            layout = {**self._layout(), "settings": self.settings.record()}
            checkpoints.write_manifest(unfinished, layout, files)
            checkpoints.finish(unfinished)

    @naming_lost_ranks
    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        *,
        fall_back: bool = False,
        load_optimizer_states: bool = True,
    ) -> tuple[str, dict[str, Any]]:
        """Go on exactly where a checkpoint was saved, also in another layout, with other ZeRO or micro-batches.

        Args:
            tag: Name of the checkpoint; by default the newest one goes on.
            fall_back: Where the newest one is not whole, take the newest that is, with a warning.
            load_optimizer_states: Whether the optimizer and its schedule go on, too; where not, they may be others, and
                begin anew.

        Returns:
            The checkpoint's path, and the ``client_state`` it was saved with.
        """
        with_optimizer = load_optimizer_states
        self.finish_saving()
        self.settle_weights()
        folder = Path(load_dir)
        name = self._choose(folder, None if tag is None else str(tag), fall_back=fall_back)
        checkpoint = folder / name
        manifest, layout = checkpoints.read_manifest(checkpoint), self._layout(with_optimizer=with_optimizer)
        saved = manifest["settings"]
        moved = [SettingChange(key, manifest.get(key), layout.get(key)) for key in _STATE_LAYOUT]
        moved = [change for change in moved if change.saved != change.value]
        compare = partial(self.settings.changed_from, saved, with_optimizer=with_optimizer)

        def check() -> tuple[dict[str, Any], SavedStates | None]:
            for key, value in layout.items():  # or optimizer states would land on other layers
                if manifest.get(key) != value and key not in _STATE_LAYOUT:
                    raise ConfigError(
                        f"{key} must be that of the checkpoint {checkpoint} ({manifest.get(key)}) to resume, got "
                        f"{value}; to go on under another one, export the checkpoint and start from the exported model"
                    )
            if with_optimizer:
                self.settings.check_groups(saved, by_name=bool(moved))
            found = self._check_readable(checkpoint, manifest, with_optimizer, bool(moved))
            compare()
            return found

        # DeepSpeedEngine.load_checkpoint communicates: what can fail on one rank only has to fail before.
        position, states = run_on_all_ranks(check, where=self.where)
        run_on_all_ranks(lambda: self.loader.load_state_dict(position), where=self.where)
        rates = [group["lr"] for group in self.basic_optimizer.param_groups]
        path, state = self._load_by_deepspeed(folder, name, with_optimizer, by_name=states is not None)
        if states is not None:
            states.load()
        self._renew(saved, rates, with_optimizer)
        changed = moved + compare()  # with the steps of the schedule, counted anew
        if self.global_rank == 0 and changed:
            LOG.warning("going on from %s with other settings: %s", checkpoint, ", ".join(map(str, changed)))
        return path, state

    def _choose(self, folder: Path, tag: str | None, *, fall_back: bool) -> str:
        # Rank 0 chooses one by the sizes of its files, and every rank reads the files that it wrote, and some of ranks
        # that there are no more. If a byte of them differs, rank 0 chooses again, without that checkpoint.
        damaged: dict[str, str] = {}
        readers = range(dist.get_world_size())

        def check(checkpoint: Path) -> str | None:
            return damaged.get(checkpoint.name) or checkpoints.has_all_files(checkpoint)

        def is_own(file: str, saved: SavedFile) -> bool:
            reader = saved.rank if saved.rank in readers else crc32(file.encode()) % len(readers)
            return bool(reader == self.global_rank)

        while True:
            choose = partial(checkpoints.choose, folder, tag, fall_back=fall_back, check=check)
            name, remark = rank_zero_only(choose, doing="looks for a whole checkpoint", where=self.where)
            own = partial(checkpoints.problem_of, folder / name, is_own)
            problems = gather(run_on_all_ranks(own, where=self.where))
            problem = next((found for found in problems if found is not None), None)
            if problem is None:
                if remark and self.global_rank == 0:
                    LOG.warning(remark)
                return name
            damaged[name] = problem

    def _check_readable(
        self, checkpoint: Path, manifest: Mapping[str, Any], with_optimizer: bool, by_name: bool
    ) -> tuple[dict[str, Any], SavedStates | None]:
        """Open what loading reads on this rank; the position in the data, and states that are read ``by_name``."""
        # DeepSpeed reads the engine's file, this rank's part of the optimizer's state, and the files of its stage's
        # layers.
        folder, name = str(checkpoint.parent), checkpoint.name
        engines = self._get_all_ckpt_names(folder, name)
        # SDLoaderBase.load takes the first file where there are others than stages.
        of_engine = self._get_ckpt_name(folder, name) if len(engines) == self.mp_world_size else engines[0]
        position = deepcopy(opened(Path(of_engine))["sampler"])  # the file is mapped
        states = None
        if with_optimizer and by_name:
            if self.zero_round_robin_gradients():  # _link_all_hp_params does not know the order in flat buffers then
                raise ConfigError(
                    "zero_optimization.round_robin_gradients must be false to go on with other stages, replicas or "
                    "ZeRO, got true; DeepSpeed's files then do not say where weights lie"
                )
            states = SavedStates(self, checkpoint, manifest)
        elif with_optimizer and self.save_zero_checkpoint:
            opened(Path(self._get_zero_ckpt_name(folder, name)))
        check_layers(self, checkpoint)
        return position, states

    def _load_by_deepspeed(
        self, folder: Path, name: str, with_optimizer: bool, *, by_name: bool
    ) -> tuple[str, dict[str, Any]]:
        """What DeepSpeedEngine.load_checkpoint loads, with the files of BF16_Optimizer."""
        # BF16_Optimizer's state is saved like ZeRO's, in files of its own (_save_zero_checkpoint), but load_checkpoint
        # looks for such files under ZeRO only.
        apart = self.using_bf16_optimizer and not self.zero_optimization()
        with replaced(self.checkpoint_engine, load=_load):
            path, state = super().load_checkpoint(
                str(folder),
                name,
                load_module_strict=self.resolved.base is None,
                load_optimizer_states=with_optimizer and not by_name and not apart,
                load_lr_scheduler_states=with_optimizer,
            )
            if apart and with_optimizer and not by_name:
                self._load_zero_checkpoint(str(folder), name)
            elif apart:
                self.optimizer.refresh_fp32_params()  # its float32 copies are still those of the weights before
        # DeepSpeedEngine returns every key of the engine's file that it has not read itself; the optimizer's and the
        # sampler's are taken out, and the caller's own are left.
        return path, {key: value for key, value in state.items() if key not in ("optimizer", "sampler")}

    def _renew(self, saved: dict[str, Any], rates: list[float], with_optimizer: bool) -> None:
        """Let the settings of this run hold where loading has brought back those of the checkpoint."""
        # DeepSpeed's optimizers clip by this attribute, and load_state_dict puts the saved value there.
        if hasattr(self.optimizer, "clip_grad"):
            self.optimizer.clip_grad = self.gradient_clipping()
        if not with_optimizer:  # the schedule begins anew
            for group, rate in zip(self.basic_optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
            return
        asked = self.resolved.config.get("scheduler", {}).get("params", {}).get("total_num_steps")
        run = self.resolved.section.run
        if asked == "auto" and run.max_steps is None:
            # A schedule over "auto" steps ends with the run: steps of another size come behind those done.
            total = self.global_steps + self.loader.steps_left(run.epochs)
            self.lr_scheduler.total_num_steps = self.settings.keys["scheduler.params.total_num_steps"] = total
        self.settings.renew_optimizer(self.basic_optimizer, saved)
        if self.lr_scheduler is not None:
            self.settings.renew_schedule(self.lr_scheduler, saved)
            renew_rate(self.lr_scheduler)

    def _layout(self, *, with_optimizer: bool = True) -> dict[str, Any]:
        """What a run must share with a checkpoint to go on from it."""
        lora, layout = self.resolved.section.model.lora, self.resolved.layout
        of_stages = [layout.shape(stage)[0] for stage in range(self.num_stages)]
        optimizer = {
            "frozen": list(check_frozen(self.resolved.vlm.records, self.resolved.section.model.frozen)),
            "lora": lora and lora.model_dump(exclude={"dropout"}),
            "optimizer": type(self.basic_optimizer).__name__,
            "parameter_groups": grouping(self.resolved.section.optimizer),
            "scheduler": None if self.lr_scheduler is None else type(self.lr_scheduler).__name__,
        }
        weights = {
            "partition": list(self.plan.partition.boundaries),
            "num_replicas": of_stages if layout.has_units else self.dp_world_size,
            "num_tensor": layout.num_tensor,
            "encoder": "spread" if layout.is_spread else None,
            "zero_stage": int(self.zero_optimization_stage()),
            "dtype": str(self.resolved.dtype),
            # which of DeepSpeed's optimizers holds the float32 copies of the weights
            **({"grad_accum_dtype": str(self.get_data_types()[1])} if self.bfloat16_enabled() else {}),
            # the weights that adapters are trained beside
            **({} if self.resolved.base is None else {BASE_WEIGHTS: checkpoints.fingerprint(self.resolved.base)}),
        }
        # What is frozen comes first, since a partition may follow from it.
        return (optimizer if with_optimizer else {}) | weights


def _held(value: Any) -> Any:
    """A copy that training does not change; a tensor's lies in the host's memory."""
    # DeepSpeed's clone_tensors_for_torch_save would share arrays with the caller.
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else deepcopy(value)


def _load(path: Any, map_location: Any = None) -> Any:
    # TorchCheckpointEngine.load unpickles whatever a file holds; this reads data only.
    return load_data(path, *CLASSES, map_location=map_location)


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
