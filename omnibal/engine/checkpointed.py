"""DeepSpeed's PipelineEngine that goes on from checkpoints, exactly, in whatever layout they were saved."""

import logging
from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any, Final
from zipfile import is_zipfile
from zlib import crc32

import torch.distributed as dist

from omnibal.engine import saved_files
from omnibal.engine.optimizer_states import SavedStates
from omnibal.engine.saving import CLASSES, SavingEngine, replaced_methods
from omnibal.engine.settings import SettingChange, renew_rate
from omnibal.errors import ConfigError
from omnibal.ranks import gather, naming_lost_ranks, rank_zero_only, run_on_all_ranks
from omnibal.vlm.weights import load_data

LOG: Final = logging.getLogger(__name__)
# Where the optimizer's state lies: under other values each rank reads it by the names of its weights.
_STATE_LAYOUT: Final = ("partition", "num_replicas", "num_tensor", "zero_stage", "grad_accum_dtype")


class CheckpointedEngine(SavingEngine):
    """Goes on from checkpoints, all ranks together, also in another layout."""

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
        with_optimizer = load_optimizer_states and not load_module_only
        with_schedule = load_lr_scheduler_states and not load_module_only
        self.finish_saving()
        self.settle_weights()
        folder = Path(load_dir)
        name = self._choose(folder, None if tag is None else str(tag), fall_back=fall_back)
        layout = self._layout(with_optimizer=with_optimizer, with_schedule=with_schedule)
        manifest = saved_files.read_manifest(folder / name)
        saved = manifest["settings"]
        moved = [SettingChange(key, manifest.get(key), layout.get(key)) for key in _STATE_LAYOUT]
        moved = [change for change in moved if change.saved != change.value]
        compare = partial(self.settings.changed_from, saved, with_optimizer=with_optimizer, with_schedule=with_schedule)

        def check() -> tuple[dict[str, Any], SavedStates | None]:
            found = self._check_readable(folder / name, layout, with_optimizer, bool(moved), strict=load_module_strict)
            compare()
            return found

        # DeepSpeedEngine.load_checkpoint communicates: what can fail on one rank only has to fail before.
        position, states = run_on_all_ranks(check, where=self.where)
        run_on_all_ranks(lambda: self.loader.load_state_dict(position), where=self.where)
        rates = [group["lr"] for group in self.basic_optimizer.param_groups]
        path, state = self._load_by_deepspeed(
            str(load_dir),
            name,
            with_optimizer=with_optimizer and states is None,
            load_module_strict=load_module_strict and self.resolved.base is None,
            load_lr_scheduler_states=load_lr_scheduler_states,
            load_module_only=load_module_only,
        )
        if states is not None:
            states.load(self)
        self._renew(saved, rates, with_optimizer=with_optimizer, with_schedule=with_schedule)
        changed = moved + compare()  # with the steps of the schedule, counted anew
        if self.global_rank == 0 and changed:
            LOG.warning("going on from %s with other settings: %s", folder / name, ", ".join(map(str, changed)))
        return path, state

    def _load_by_deepspeed(
        self, load_dir: str, name: str, *, with_optimizer: bool, **options: bool
    ) -> tuple[str, dict[str, Any]]:
        """What DeepSpeedEngine.load_checkpoint loads, with the files of BF16_Optimizer."""
        # BF16_Optimizer's state is saved like ZeRO's, in files of its own (_save_zero_checkpoint), but load_checkpoint
        # looks for such files under ZeRO only.
        apart = self.using_bf16_optimizer and not self.zero_optimization()
        with replaced_methods(self.checkpoint_engine, load=_load):
            path, state = super().load_checkpoint(
                load_dir, name, load_optimizer_states=with_optimizer and not apart, **options
            )
            if apart and with_optimizer:
                self._load_zero_checkpoint(load_dir, name)
        if apart and not with_optimizer:
            self.optimizer.refresh_fp32_params()  # its float32 copies are still those of the weights before
        # DeepSpeedEngine returns every key of the engine's file that it has not read itself; the optimizer's and the
        # sampler's are taken out, and the caller's own are left.
        return path, {key: value for key, value in state.items() if key not in ("optimizer", "sampler")}

    def _renew(self, saved: dict[str, Any], rates: list[float], *, with_optimizer: bool, with_schedule: bool) -> None:
        """Let the settings of this run hold where loading has brought back those of the checkpoint."""
        asked = self.resolved.config.get("scheduler", {}).get("params", {}).get("total_num_steps")
        run = self.resolved.section.run
        if with_schedule and asked == "auto" and run.max_steps is None:
            # A schedule over "auto" steps ends with the run: steps of another size come behind those done.
            total = self.global_steps + self.loader.steps_left(run.epochs)
            self.lr_scheduler.total_num_steps = self.settings.keys["scheduler.params.total_num_steps"] = total
        # DeepSpeed's optimizers clip by this attribute, and load_state_dict puts the saved value there.
        if hasattr(self.optimizer, "clip_grad"):
            self.optimizer.clip_grad = self.gradient_clipping()
        if with_optimizer:
            self.settings.renew_optimizer(self.basic_optimizer, saved)
        if self.lr_scheduler is None:
            return
        if with_schedule:
            self.settings.renew_schedule(self.lr_scheduler, saved)
            renew_rate(self.lr_scheduler)
        else:  # it begins anew
            for group, rate in zip(self.basic_optimizer.param_groups, rates, strict=True):
                group["lr"] = rate

    def _choose(self, folder: Path, tag: str | None, *, fall_back: bool) -> str:
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

    def _check_readable(
        self, checkpoint: Path, layout: dict[str, Any], with_optimizer: bool, is_moved: bool, *, strict: bool
    ) -> tuple[dict[str, Any], SavedStates | None]:
        """The position in the data, and the optimizer's state if it ``is_moved`` or its groups have another order."""
        # Else DeepSpeed reads the state, which it can where this rank wrote it.
        saved = saved_files.read_manifest(checkpoint)
        for key, value in layout.items():  # or optimizer states would land on other layers
            before = saved.get(key)
            if before != value and key not in _STATE_LAYOUT:
                raise ConfigError(
                    f"{key} must be that of the checkpoint {checkpoint} ({before}) to resume, got {value}; "
                    "to go on under another one, export the checkpoint and start from the exported model"
                )
        by_name = is_moved
        if with_optimizer:
            has_order = self.settings.check_groups(
                saved["settings"], by_name=is_moved, with_schedule="scheduler" in layout
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
            saved = self.module.saved_state(
                checkpoint, index, lambda path: {name: each.to("meta") for name, each in _opened(path).items()}
            )
            found = {name: tensor.shape for name, tensor in saved.items()}
            differing = {name for name, _ in found.items() ^ expected.items()} - (in_folder - found.keys())
            if not strict:
                differing &= found.keys() & expected.keys()
            if differing:
                raise ConfigError(
                    f"checkpoint must be of a model with the same weights, got layer {index} of {checkpoint} with "
                    f"other {', '.join(sorted(differing)[:3])}"
                )


def _load(path: Any, map_location: Any = None) -> Any:
    # TorchCheckpointEngine.load unpickles whatever a file holds; this reads data only.
    return load_data(path, *CLASSES, map_location=map_location)


def _opened(path: Path) -> Any:
    """What a file holds; tensors are mapped, not read."""
    try:
        return load_data(path, *CLASSES, map_location="cpu", mmap=is_zipfile(path))
    except Exception as error:
        others = saved_files.offer(path.parent.parent, path.parent.name, saved_files.has_all_files)
        raise ConfigError(
            f"checkpoint must be readable, got {path}: {type(error).__name__}: {error}{others}"
        ) from error
