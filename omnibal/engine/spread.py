"""The encoder on all ranks: each encodes its share of a step's images before the LLM's pipeline, and trains behind it.

The first stage's ranks read the images, as in any pipeline. In a step

1. tiles (images of any size) go from there to where the encoder is even, in one all-to-all (`SpreadEncoder.encode`);
2. every rank encodes its share, and features go back to where the pipeline begins, in another one;
3. the pipeline runs, with features as an input of its first stage, whose gradients add up beside them;
4. these gradients go to where the features were made, and the encoder runs backward (`SpreadEncoder.backward`).

The encoder's gradients are summed over all ranks (`omnibal.engine.reduction`), and its optimizer state is shared by all
ranks (`states_on_all_ranks`).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, Final

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe import engine as pipeline_engine
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import Tensor

from omnibal.cost import IntArray
from omnibal.dispatch.divide import divide
from omnibal.dispatch.exchange import exchange
from omnibal.dispatch.rearrangement import Rearrangement
from omnibal.engine.grid import replaced
from omnibal.engine.module import ON_ALL_RANKS, VlmPipelineModule
from omnibal.formats.collate import GRIDS
from omnibal.ranks import gather
from omnibal.vlm.layers import VisionLanguageModel
from omnibal.vlm.measure import image_tokens_per_tile
from omnibal.vlm.payload import PackCounts, Payload, note_counts

HIDDEN: Final = "hidden"  # name of the projector's output among the features that travel
_NO_TILES, _NO_GRIDS = np.zeros((0, 0), dtype=np.int64), np.zeros((0, 3), dtype=np.int64)


class SpreadEncoder:
    """Encodes the images of a step on all ranks of a `VlmPipelineModule` that holds the whole encoder on each."""

    def __init__(self, module: VlmPipelineModule, device: torch.device) -> None:
        self._module, self._device = module, device
        layout = module.layout
        # A rank of the first stage gets the mean over its replicas' losses, and all ranks average encoder gradients.
        self._scale = layout.num_devices / layout.num_replicas
        # Features that arrived with the graph of their encoder, and the gradients that the pipeline adds up for them.
        self._arrived: list[Tensor] = []
        self._gradients: list[Tensor] = []

    def encode(self, packs: Sequence[Payload]) -> list[Payload]:
        """From the packs of a step, with pixels, to the same with features; all ranks together.

        ``packs`` are those of this rank, on the host: none on ranks behind the first stage.
        """
        vlm, rank = self._module.vlm, dist.get_rank()
        # What is encoded by itself: tiles, or images of any size with their grids; rank after rank, pack after pack.
        own = [_grids(vlm, pack) for pack in packs]
        found = gather(np.concatenate([_NO_TILES if not vlm.image_integers else _NO_GRIDS, *own]))
        grids, holders = np.concatenate(found), np.repeat(np.arange(len(found)), [len(each) for each in found])
        rows = grids.prod(axis=1)
        move = Rearrangement(holders, divide(np.stack([rows, rows**2], axis=1), len(found)), len(found))
        # What was read is not kept: a device of the first stage has the pixels of all its micro-batches here.
        (share,) = exchange({"pixel_values": self._pixels(packs)}, {"pixel_values": rows}, move).values()
        encoded = self._module.encode(_images(vlm, share, grids[move.brought_to(rank)]))
        features, tokens = {HIDDEN: encoded.hidden, **encoded.features}, _tokens(vlm, rows)
        arrived = exchange(features, dict.fromkeys(features, tokens), move.inverse())
        ends = accumulate((int(_tokens(vlm, each.prod(axis=1)).sum()) for each in own), initial=0)
        return self._dealt(packs, [*ends], arrived)

    def backward(self) -> None:
        """Run the encoder backward from the gradients of a step's features; all ranks together."""
        arrived, gradients = self._arrived, self._gradients
        self._arrived, self._gradients = [], []
        if arrived:  # a frozen encoder gets nothing
            torch.autograd.backward(arrived, [gradient.mul_(self._scale) for gradient in gradients])

    def _pixels(self, packs: Sequence[Payload]) -> Tensor:
        empty = torch.empty(0, *self._module.vlm.pixel_shape, dtype=self._module.dtype, device=self._device)
        return torch.cat([empty, *(pack.hidden.to(self._device, non_blocking=True) for pack in packs)])

    def _dealt(self, packs: Sequence[Payload], bounds: list[int], arrived: Mapping[str, Tensor]) -> list[Payload]:
        """Each pack with its features, cut off from the encoder's graph."""
        sums = {name: torch.zeros_like(tensor) for name, tensor in arrived.items() if tensor.requires_grad}
        self._arrived, self._gradients = [arrived[name] for name in sums], [*sums.values()]
        found = []
        for pack, (start, stop) in zip(packs, pairwise(bounds), strict=True):
            own = {name: tensor.detach()[start:stop] for name, tensor in arrived.items()}
            for name, gradients in sums.items():
                # Autograd adds to a gradient that is there, in place: what the pipeline sends back lies in one tensor
                # for all packs when the last backward pass is done.
                own[name].requires_grad_().grad = gradients[start:stop]
            found.append(pack.replace(hidden=own.pop(HIDDEN), features=own))
        return found


def _grids(vlm: VisionLanguageModel, pack: Payload) -> IntArray:
    """The grid of each image of a pack, (images, 3); of tiles, which all are alike, none: (tiles, 0)."""
    if not vlm.image_integers:
        return np.zeros((len(pack.hidden), 0), dtype=np.int64)
    return np.array(pack.on_host(GRIDS), dtype=np.int64).reshape(-1, 3)


def _tokens(vlm: VisionLanguageModel, rows: IntArray) -> IntArray:
    """Image tokens of tiles, or of images by their patches."""
    if not vlm.image_integers:
        return rows * image_tokens_per_tile(vlm)
    return rows // next(record.sizes["units_per_token"] for record in vlm.records if record.kind == "projector")


def _images(vlm: VisionLanguageModel, pixels: Tensor, grids: IntArray) -> Payload:
    integers = {name: torch.from_numpy(grids).to(pixels.device, non_blocking=True) for name in vlm.image_integers}
    bounds = torch.zeros(1, dtype=torch.int32, device=pixels.device)  # of samples, which no layer of an encoder reads
    note_counts([bounds], PackCounts(None, (), dict.fromkeys(integers, grids.tolist())))
    return Payload(pixels, {**integers, "cu_seq_lens": bounds})


class _StatesOnAllRanks:
    """Lets ranks share the optimizer state of some parameter groups with all ranks, of others with their replicas."""

    optimizer: Any
    real_dp_process_group: list[Any]
    partition_count: list[int]

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        # Both optimizers have one process group for each parameter group, which they set by a method of their own where
        # there are experts; nothing else of experts is wanted.
        super().__init__(*arguments, **{**keywords, "has_moe_layers": True})

    def _configure_moe_settings(self) -> None:
        self.has_moe_layers = False
        for index, group in enumerate(self.optimizer.param_groups):
            if group.get(ON_ALL_RANKS):
                self.real_dp_process_group[index] = dist.group.WORLD
        self.partition_count = [dist.get_world_size(group) for group in self.real_dp_process_group]


class SpreadZeroOptimizer(_StatesOnAllRanks, DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """ZeRO 1 of a rank that holds a spread encoder."""


class SpreadBfloat16Optimizer(_StatesOnAllRanks, BF16_Optimizer):  # type: ignore[misc]
    """BF16_Optimizer of a rank that holds a spread encoder."""


@contextmanager
def states_on_all_ranks() -> Iterator[None]:
    """Let an engine that is built inside share the optimizer state of a spread encoder over all ranks."""
    # DeepSpeedEngine makes its optimizer by these names; PipelineEngine compares the class by one of them.
    in_bfloat16 = {"BF16_Optimizer": SpreadBfloat16Optimizer}
    with (
        replaced(deepspeed_engine, DeepSpeedZeroOptimizer=SpreadZeroOptimizer, **in_bfloat16),
        replaced(pipeline_engine, **in_bfloat16),
    ):
        yield
