"""Layers on a GPU beside what is counted for them: times, bytes kept, recompute levels, the host's part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from omnibal.cost import CostModel, Load
from omnibal.device import DEVICES, Device
from omnibal.passes import Timing, time_passes
from omnibal.profile.counted import analytic_profile
from omnibal.profile.records import LEVELS, LayerCost
from omnibal.vlm.measure import LayerRun, MadePack, image_tokens_per_tile
from omnibal.vlm.payload import run_layer
from tools.gpu.report import Row

if TYPE_CHECKING:
    from omnibal.families.base import LayerRecord
    from omnibal.vlm.layers import VisionLanguageModel
    from omnibal.vlm.payload import Payload

MIB = 2**20
SHARES = (1 / 8, 1 / 4, 1 / 2, 1)
"""Of the largest pack: enough to see where an affine model is wrong."""
HOST_CALLS = 5


def counted_device(name: str) -> Device:
    """What is known of a device: the one whose name occurs in the driver's, or an A100."""
    known = [device for device in DEVICES.values() if device.name.split("-")[0].lower() in name.lower()]
    return max(known, key=lambda device: device.memory_bytes) if known else DEVICES["A100-80GB"]


@dataclass
class LayerBench:
    """Measures one layer of each kind of some models, smallest pack first.

    Attributes:
        models: By name.
        device: Where they run.
        counted: What costs are counted for.
        tiles, tokens: The largest pack; half of its tokens are text, at most.
        recomputed, hosts, fits: Rows of the other tables, filled while ``times`` is taken.
    """

    models: dict[str, VisionLanguageModel]
    device: torch.device
    counted: Device
    tiles: int
    tokens: int
    recomputed: list[Row] = field(default_factory=list)
    hosts: list[Row] = field(default_factory=list)
    fits: list[Row] = field(default_factory=list)

    def times(self) -> Iterator[Row]:
        """Forward and backward of every kind of layer over pack sizes, beside what is counted."""
        for name, model in self.models.items():
            yield from self._model(name, model)

    def _model(self, name: str, model: VisionLanguageModel) -> Iterator[Row]:
        profile = analytic_profile(model.records, self.counted, dtype="bfloat16")
        packs = [self._pack(model, share) for share in SHARES]
        payloads = [pack.payload(model, dtype=torch.bfloat16, device=self.device) for pack in packs]
        merged, seen = False, set()
        for index, (record, cost) in enumerate(zip(model.records, profile.layers, strict=True)):
            group = f"{record.kind} {sorted(record.sizes.items())}"
            merged = merged or record.module == "language"
            if group in seen:
                continue
            seen.add(group)
            layer = model.build_layer(index, seed=0, dtype=torch.bfloat16, device=self.device)
            trials = [self._trial(model, index, layer, payload) for payload in payloads]
            loads = [pack.load if merged else Load(pack.load.vision_units, 0) for pack in packs]
            yield from self._layer(f"{name}", record, cost, trials, loads)
            with torch.no_grad():
                payloads = [layer(payload) for payload in payloads]
            del layer, trials
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _layer(
        self, name: str, record: LayerRecord, cost: LayerCost, trials: list[LayerRun], loads: list[Load]
    ) -> Iterator[Row]:
        seconds = []
        for trial, load in zip(trials, loads, strict=True):
            forward, backward = trial.time_passes()
            seconds.append((forward.seconds, backward.seconds))
            expected = counted(cost.backward_seconds + cost.weight_seconds, load)  # none of the head's, made forward
            yield {
                "model": name,
                "layer": record.kind,
                "tiles": int(load.vision_units),
                "tokens": int(load.llm_tokens),
                "forward ms": 1e3 * forward.seconds,
                "measured / counted": forward.seconds / counted(cost.forward_seconds, load),
                "backward ms": 1e3 * backward.seconds,
                "backward measured / counted": backward.seconds / expected if expected else "not counted",
                "spread": (forward + backward).spread,
            }
        self.fits.append(fit_row(name, record.kind, Load.stack(loads), [sum(pair) for pair in seconds]))
        self.recomputed.extend(self._levels(name, record.kind, cost, trials[-1], loads[-1]))
        self.hosts.append({"model": name, "layer": record.kind} | self._host(trials[-1], seconds[-1][0]))

    def _levels(self, name: str, kind: str, cost: LayerCost, trial: LayerRun, load: Load) -> Iterator[Row]:
        """Bytes kept and the backward pass's time at each level, for the largest pack."""
        measured = trial.measure()
        for level in LEVELS:
            kept, found = cost.saved_bytes.get(level), measured.kept_bytes[level]
            backward = measured.backward if level == "none" else measured.backward_by_level[level]
            yield {
                "model": name,
                "layer": kind,
                "level": level,
                "kept MiB": found / MIB,
                "measured / counted": "not counted" if kept is None else found / max(counted(kept, load), 1),
                "the allocator's MiB": self._allocated(trial, level) / MIB,
                "backward ms": 1e3 * backward.seconds,
                "of none": backward.seconds / measured.backward.seconds,
            }

    def _allocated(self, trial: LayerRun, level: Any) -> int:
        """By how much a forward pass leaves more memory taken, its output aside."""
        if self.device.type != "cuda":
            return 0
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        output = run_layer(trial.layer, _as_received(trial.payload), level).hidden
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated() - before - output.nbytes

    def _host(self, trial: LayerRun, forward_seconds: float) -> Row:
        """What the host takes to start a forward pass, before it waits for the device."""
        for level in ("none", "selective"):
            run_layer(trial.layer, trial.payload, level)  # type: ignore[arg-type]
        found: dict[str, float] = {}
        for level in ("none", "selective", "full"):
            payload = _as_received(trial.payload)
            self._wait()
            start = perf_counter()
            for _ in range(HOST_CALLS):
                output = run_layer(trial.layer, payload, level)  # type: ignore[arg-type]
            found[f"host ms, {level}"] = 1e3 * (perf_counter() - start) / HOST_CALLS
            self._wait()
            del output
        return {**found, "forward on the device ms": 1e3 * forward_seconds}

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def _pack(self, model: VisionLanguageModel, share: float) -> MadePack:
        """A share of the largest pack: half of it one long sample with its images, half of it four texts."""
        tokens = max(8, round(self.tokens * share))
        tiles = min(max(1, round(self.tiles * share)), tokens // 2 // image_tokens_per_tile(model))
        text = tokens - tokens // 2
        return MadePack(tiles, (tokens // 2, *(text // 4 + (text % 4 > i) for i in range(4))))

    def _trial(self, model: VisionLanguageModel, index: int, layer: torch.nn.Module, payload: Payload) -> LayerRun:
        return LayerRun(layer, payload, model.sent_tensors(index + 1), from_pixels=index == 0)


def _as_received(payload: Payload) -> Payload:
    return payload.with_floats(lambda tensor: tensor.detach().requires_grad_(True))


def counted(cost: CostModel, load: Load) -> float:
    """A cost of one pack."""
    return float(cost(load))


def fit_row(name: str, kind: str, loads: Load, seconds: list[float]) -> Row:
    """How far the affine model is off its own measurements."""
    fitted = CostModel.fit(loads, seconds)
    errors = [float(value) / true - 1 for value, true in zip(fitted(loads), seconds, strict=True)]
    return {
        "model": name,
        "layer": kind,
        **{f"error at {share:.3g}": error for share, error in zip(SHARES, errors, strict=True)},
        "fixed ms": 1e3 * fitted.fixed,
    }


def attention_rows(device: torch.device, tokens: int) -> Iterator[Row]:
    """Attention over a pack: our packed kernel, the samples padded to a batch, and one dense mask over the pack."""
    heads, kv_heads, width = 28, 4, 128
    for name, lengths in {
        "even": [tokens // 16] * 16,
        "uneven": [tokens // 2, tokens // 4, *[tokens // 64] * 16],
        "one sample": [tokens],
    }.items():
        row: dict[str, Any] = {"samples": name, "tokens": tokens, "longest": max(lengths)}
        for way, function in attention_ways(lengths, heads, kv_heads, width, device).items():
            try:
                forward, backward, _ = time_passes(function, device)
                row[f"{way} ms"] = 1e3 * (forward + backward).seconds
            except RuntimeError as error:  # a mask of the pack's size squared may not fit
                row[f"{way} ms"] = type(error).__name__
        yield row


def attention_ways(lengths: list[int], heads: int, kv_heads: int, width: int, device: torch.device) -> dict[str, Any]:
    """A function for each way, which computes the output afresh."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import pad, scaled_dot_product_attention

    from omnibal.vlm.attention import attention_kwargs, packed_attention

    tokens, longest = sum(lengths), max(lengths)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16, requires_grad=True)

    query, key, value = (
        random(1, heads, tokens, width),
        random(1, kv_heads, tokens, width),
        random(1, kv_heads, tokens, width),
    )
    bounds = pad(torch.tensor(lengths, device=device).cumsum(0), (1, 0)).to(torch.int32)
    kwargs = attention_kwargs(bounds)
    module = torch.nn.Module()
    batch = [random(len(lengths), count, longest, width) for count in (heads, kv_heads, kv_heads)]

    def packed() -> torch.Tensor:
        return packed_attention(module, query, key, value, None, is_causal=True, **kwargs)[0]

    def padded() -> torch.Tensor:
        return scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=True)

    def by_flash() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return padded()

    def masked() -> torch.Tensor:
        sample = torch.repeat_interleave(
            torch.arange(len(lengths), device=device), torch.tensor(lengths, device=device)
        )
        mask = (sample[:, None] == sample) & torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril()
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)

    return {"packed": packed, "padded batch": padded, "the same by flash attention": by_flash, "dense mask": masked}


def peak_rows(device: torch.device, size: int, counted: Device) -> Iterator[Row]:
    """What the device reaches on plain work: the yardstick for everything else."""
    left = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    right = torch.randn(size, size, device=device, dtype=torch.bfloat16)
    seconds = best(lambda: left @ right, device)
    rate = 2 * size**3 / seconds
    yield {"work": f"matrix product of {size}, bf16", "reached": f"{rate / 1e12:.4g} TFLOP/s",
           "of the data sheet's": rate / counted.flops_per_second}  # fmt: skip
    source = torch.empty(64 * size * size, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / best(lambda: target.copy_(source), device)
    yield {"work": "copy, bytes read and written", "reached": f"{rate / 1e12:.4g} TB/s",
           "of the data sheet's": rate / counted.memory_bytes_per_second}  # fmt: skip


def best(work: Any, device: torch.device) -> float:
    """Seconds of the median of a few runs."""
    seconds = []
    for _ in range(8):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    return Timing.of(seconds[3:]).seconds
