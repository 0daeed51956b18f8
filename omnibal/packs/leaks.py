"""Proves that the samples of a pack do not change each other, or names the layers that let something across.

A pack is one row of several samples. What leaks in it raises no error: attention that sees the sample before, the state
of a recurrence or a convolution that is not reset, positions that go on counting. Three proofs are made:

1. **Isolation.** The pack is run again with other contents in one of its samples. At every module's inputs and outputs
   the rows of all other samples must stay as they were. Where they do not, the module is named, and gets the rows that
   it should have got, so that modules behind it are judged by themselves.
2. **Logits** are those of each sample alone. Wrong positions change nothing under 1, and show here.
3. **Gradients** of the pack are the sum of the samples' alone: a backward pass may leak where no forward pass does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from omnibal.errors import ConfigError
from omnibal.packs.apart import evaluated, mapped, plain_words

# By bytes of a number. How far logits and gradients of a pack may be from its samples' alone, as a share of their norm;
# in 64 bits norms, softmax and rotary tables still compute in 32.
TOLERANCES: Final = {2: 0.05, 4: 1e-3, 8: 1e-5}
# How far rows may be between two runs with equal shapes, as a share of the mean row's norm. They are equal to the bit,
# but in mixtures of experts, whose products then have other shapes: a few roundings, which add up from layer to layer.
NOISE: Final = {2: 0.01, 4: 3e-5, 8: 1e-6}
KINDS: Final = (  # parts of class names, in this order, and what they are
    (("rotary", "position"), "positions"),
    (("delta", "mamba", "ssm", "recurrent", "lightning", "linearatt", "rwkv", "mixer"), "recurrent state"),
    (("conv",), "convolution"),
    (("router", "expert", "moe"), "experts"),
    (("attention", "attn"), "attention"),
)
SORTED: Final = "experts"
"""Part of the class names of modules that sort rows by expert: what their parts compute stands in no sample's order."""
REMEDIES: Final = {
    "attention": "give position_ids that restart at each sample, no attention_mask and use_cache=False, or sequence "
    "bounds to flash attention; a model whose images see each other's tokens needs a mask of samples",
    "recurrent state": "reset the state, and the convolution before it, at each sample: pass cu_seqlens and seq_idx to "
    "the kernels, or train on padded rows",
    "convolution": "pad each sample by itself: pass seq_idx to the kernel, or train on padded rows",
    "positions": "let position_ids restart at each sample, in every row of them",
    "experts": "route each token by itself: no capacity per batch",
    "other": "train on padded rows",
}
BEYOND: Final = (
    "rows that stay below the number do not show it; omnibal's own packs give each sample the rotary embeddings of its "
    "own length, and stay below numbers that count rows"
)


class Leak(NamedTuple):
    """A module that lets something across from one sample to another."""

    module: str
    """Dotted name in the model; empty for the model's own forward method."""
    class_name: str
    kind: str
    """``attention``, ``recurrent state``, ``convolution``, ``positions``, ``experts`` or ``other``."""
    error: float
    """Largest change of a row of another sample, as a share of the mean row's norm."""

    def __str__(self) -> str:
        return f"{self.module or 'the model'} ({self.class_name}, {self.kind}): {self.error:.1%}"


@dataclass(frozen=True)
class PackingCheck:
    """What a check of a model's packs found."""

    leaks: tuple[Leak, ...]
    """Modules that leak, in the order in which they run."""
    logits_error: float
    """Distance of a pack's logits from its samples' alone, as a share of their norm."""
    gradients_error: float | None
    """The same for the gradients of weights; None where they were not checked."""
    tolerance: float
    has_images: bool
    """Whether a sample had an image; else only the language model was checked."""
    beyond: tuple[str, ...] = ()
    """Numbers of the configuration beyond which packs leak, or could not be tried; the samples lie below them."""

    @property
    def is_exact(self) -> bool:
        """Whether packs of the model compute what its samples alone do."""
        errors = (self.logits_error, self.gradients_error or 0.0)
        return not self.leaks and not self.beyond and all(error <= self.tolerance for error in errors)

    @property
    def remedies(self) -> tuple[str, ...]:
        """What helps against each kind of leak."""
        if self.beyond:
            return (BEYOND,)
        return tuple(f"{kind}: {REMEDIES[kind]}" for kind in dict.fromkeys(leak.kind for leak in self.leaks))

    @property
    def errors(self) -> str:
        """The distances in words."""
        gradients = "" if self.gradients_error is None else f", gradients by {self.gradients_error:.2g}"
        return f"logits that differ from the samples' alone by {self.logits_error:.2g}{gradients}"

    @property
    def summary(self) -> str:
        """Whether packs are exact, and by how much they are not, in words."""
        kind = "packs" if self.has_images else "packs of text alone"
        if self.beyond:
            leak = "leak" if self.leaks else "could not be tried"
            return f"{kind} {leak} beyond {' and '.join(self.beyond)}; up to there they have {self.errors}"
        return f"{kind} {'are exact' if self.is_exact else 'leak'}: {self.errors}"

    @property
    def through(self) -> str:
        """The modules that leak, in words: the worst of each class, and how many more there are."""
        if self.beyond and not self.leaks:
            return "no small model in which such rows could be tried"
        by_class: dict[str, list[Leak]] = {}
        for leak in self.leaks:
            by_class.setdefault(leak.class_name, []).append(leak)
        worst = [
            f"{max(found, key=lambda leak: leak.error)}" + (f" and {len(found) - 1} more" if found[1:] else "")
            for found in by_class.values()
        ]
        return "; ".join(worst) or "a backward pass, and no module of the forward pass"

    def __str__(self) -> str:
        return self.summary if self.is_exact else f"{self.summary}{';' if self.beyond else ','} through {self.through}"

    def require(self) -> None:
        """Raise a ConfigError that names the layers, unless packs are exact."""
        if not self.is_exact:
            got = self.summary if self.beyond else f"got {self.errors}"
            raise ConfigError(
                f"samples of a pack must not change each other, {got}, through {self.through}; "
                f"{'; '.join(self.remedies)}"
            )


def compare(
    model: nn.Module,
    alone: Sequence[Mapping[str, Any]],
    packed: Mapping[str, Any],
    *,
    device: torch.device | None = None,
    rounded: bool = False,
    isolation: bool = True,
    gradients: bool = False,
) -> PackingCheck:
    """Compare a pack with its samples alone, in the order in which they stand in it.

    Args:
        alone: The model's inputs of each sample by itself.
        packed: The model's inputs of the pack.
        rounded: Whether the model computes in 16 bits whatever its logits come in, as under autocast.
        isolation: Whether leaks are looked for where the logits agree; they always are where these do not.
        gradients: Whether gradients are compared: the model must not be wrapped in ZeRO 3 or FSDP then.
    """
    device = device or next(model.parameters()).device
    samples = [_sent(each, device) for each in alone]
    pack = _sent(packed, device)
    _check_rows(samples, pack)
    with evaluated(model):
        seen = _ModuleTensors(model)
        with torch.no_grad():
            expected = [seen.run(sample, number) for number, sample in enumerate(samples)]
            found = seen.run(pack)
        tolerance = TOLERANCES[2 if rounded else found.dtype.itemsize]
        right = torch.cat(expected)
        error = float((found - right).float().norm() / right.float().norm())
        leaks: dict[str, Leak] = {}
        if isolation or not error <= tolerance:
            with torch.no_grad():
                bounds = [0, *accumulate(len(each) for each in expected)]
                for number, (start, stop) in enumerate(pairwise(bounds)):
                    seen.run_changed(_changed(model, pack, samples, number), number, slice(start, stop), leaks)
                if not leaks and not error <= tolerance:  # the same rows in each pack, and yet others than alone
                    seen.run_as_alone(samples, pack, leaks, tolerance)
        of_weights = _gradients_error(model, samples, pack) if gradients else None
    order = {name: place for place, (name, _) in enumerate(model.named_modules())}
    in_order = sorted(leaks.values(), key=lambda leak: order[leak.module])
    return PackingCheck(tuple(in_order), error, of_weights, tolerance, "pixel_values" in pack)


def _sent(inputs: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    return {
        name: value.to(device) if isinstance(value, Tensor) else value
        for name, value in inputs.items()
        if name != "labels"
    }


def _check_rows(samples: Sequence[Mapping[str, Any]], pack: Mapping[str, Any]) -> None:
    ids, expected = pack["input_ids"], torch.cat([sample["input_ids"] for sample in samples], dim=1)
    if len(samples) < 2:
        raise ConfigError(f"items must be two samples or more to check packs with, got {len(samples)}")
    if ids.shape != expected.shape or not bool((ids == expected).all()):
        raise ConfigError(
            f"collate must lay the tokens of its items one after another in one row of {expected.shape[1]}, got "
            f"input_ids of shape {tuple(ids.shape)}"
        )


def _changed(model: Any, pack: Mapping[str, Any], samples: Sequence[Mapping[str, Any]], number: int) -> dict[str, Any]:
    """The pack with other words and pixels in one sample, in the same places."""
    changed = dict(pack)
    for name, value in pack.items():
        if not isinstance(value, Tensor) or not (name == "input_ids" or value.is_floating_point()):
            continue
        with_it = [at for at, sample in enumerate(samples) if isinstance(sample.get(name), Tensor)]
        rows = _rows([samples[at][name].shape for at in with_it], value.shape)
        if rows is None or number not in with_it:
            continue
        dim, bounds = rows
        start, stop = bounds[with_it.index(number) :][:2]
        own = value.narrow(dim, start, stop - start)
        other = _other_words(model, own) if name == "input_ids" else -own.flip(-1)
        changed[name] = value.clone()
        changed[name].narrow(dim, start, stop - start).copy_(other)
    return changed


def _other_words(model: Any, ids: Tensor) -> Tensor:
    """Each word's next one in the list of words that stand for nothing special."""
    # A wrapper's configuration is not the model's.
    configs = (getattr(module, "config", None) for module in model.modules())
    words = plain_words(next(each for each in configs if hasattr(each, "get_text_config"))).to(ids.device)
    places = torch.searchsorted(words, ids).clamp(max=len(words) - 1)
    is_word = words[places] == ids
    return torch.where(is_word, words[(places + 1) % len(words)], ids)


def _rows(shapes: Sequence[torch.Size], packed: torch.Size) -> tuple[int, list[int]] | None:
    """The dimension in which tensors of samples lie one after another in a pack's, and their bounds; None: in none."""
    if not shapes or any(len(shape) != len(packed) for shape in shapes):
        return None
    for dim, size in enumerate(packed):
        sizes = [shape[dim] for shape in shapes]
        rest = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        if sum(sizes) == size and rest == {(*packed[:dim], *packed[dim + 1 :])}:
            return dim, list(accumulate(sizes, initial=0))
    return None


Spot = tuple[str, int, bool, tuple[Any, ...]]
"""A tensor in a pass: module, how often it ran before, whether it goes in, and where it stands in the arguments."""
Look = Callable[[Spot, Tensor], Tensor]


@dataclass
class _ModuleTensors:
    """Tensors that go into and come out of a model's modules."""

    model: Any
    _shapes: dict[Spot, dict[int, torch.Size]] = field(default_factory=dict)  # of each sample alone
    _base: dict[Spot, Tensor] = field(default_factory=dict)  # of the pack
    _logits: Tensor = field(init=False)  # of the pack

    def run(self, inputs: Mapping[str, Any], sample: int | None = None) -> Tensor:
        """Logits (tokens, words) of a sample, whose shapes are kept, or of the pack, whose tensors are."""

        def look(spot: Spot, tensor: Tensor) -> Tensor:
            if sample is None:
                self._base[spot] = tensor.clone()  # what comes may change it in spot
            else:
                self._shapes.setdefault(spot, {})[sample] = tensor.shape
            return tensor

        self._logits = self._run(inputs, look)  # the pack's, which is run last
        return self._logits

    def run_changed(self, inputs: Mapping[str, Any], changed: int, rows: slice, leaks: dict[str, Leak]) -> None:
        """Find modules in which the pack's other samples do not stay as they were, if their logits do not."""
        # ``rows`` of the logits are those of the sample that has changed.
        differences = (self.model(**inputs)["logits"][0] - self._logits).float().norm(dim=1)
        differences[rows] = 0
        scale = self._logits.float().norm(dim=1).mean()
        noise = NOISE[self._logits.dtype.itemsize]
        if differences.max() <= noise * scale:
            return
        found: dict[str, Leak] = {}

        def look(spot: Spot, tensor: Tensor) -> Tensor:
            base, shapes = self._base.get(spot), self._shapes.get(spot, {})
            rows = None if base is None or base.shape != tensor.shape else _rows([*shapes.values()], tensor.shape)
            if base is None or rows is None:
                return tensor
            dim, bounds = rows
            others = torch.ones(tensor.shape[dim], dtype=torch.bool, device=tensor.device)
            for sample, (start, stop) in zip(shapes, pairwise(bounds), strict=True):
                others[start:stop] = sample != changed
            return self._judged(spot, tensor, base, dim, others, found)

        self._run(inputs, look)
        # What leaks less than noise, and is made larger behind it, is still what leaks most.
        largest = max((leak.error for leak in found.values()), default=0.0)
        leaks.update({name: leak for name, leak in found.items() if leak.error > min(noise, 0.99 * largest)})

    def run_as_alone(
        self, samples: Sequence[Mapping[str, Any]], pack: Mapping[str, Any], leaks: dict[str, Leak], tolerance: float
    ) -> None:
        """Find modules that give the pack other rows than its samples alone."""
        alone: dict[Spot, list[Tensor]] = {}
        found: dict[str, Leak] = {}

        def keep(spot: Spot, tensor: Tensor) -> Tensor:
            alone.setdefault(spot, []).append(tensor.clone())  # what comes may change it in spot
            return tensor

        for sample in samples:
            self._run(sample, keep)

        def look(spot: Spot, tensor: Tensor) -> Tensor:
            parts = alone.get(spot, [])
            rows = _rows([part.shape for part in parts], tensor.shape)
            if rows is None:
                return tensor
            everywhere = torch.ones(tensor.shape[rows[0]], dtype=torch.bool, device=tensor.device)
            return self._judged(spot, tensor, torch.cat(parts, rows[0]), rows[0], everywhere, found)

        self._run(pack, look)
        leaks.update({name: leak for name, leak in found.items() if leak.error > tolerance})

    def _judged(
        self, spot: Spot, tensor: Tensor, right: Tensor, dim: int, judged: Tensor, found: dict[str, Leak]
    ) -> Tensor:
        """The tensor with the right rows where they are judged; notes the module if they differ at all."""
        differences = (tensor - right).float().movedim(dim, 0).flatten(1).norm(dim=1)
        scale = right.float().movedim(dim, 0).flatten(1).norm(dim=1).mean()
        error = float((differences * judged).max() / scale) if scale > 0 else 0.0
        if not error > 0:
            return tensor
        name, _, goes_in, _ = spot
        # A module's input is made by the module around it, from what the modules before it gave.
        leaking = name.rpartition(".")[0] if goes_in else name
        if leaking not in found or found[leaking].error < error:
            class_name = type(self.model.get_submodule(leaking)).__name__
            words = f"{leaking.rpartition('.')[2]} {class_name}".lower().replace("_", "")
            kind = next((kind for parts, kind in KINDS if any(part in words for part in parts)), "other")
            found[leaking] = Leak(leaking, class_name, kind, error)
        shape = [-1 if each == dim else 1 for each in range(tensor.dim())]
        return torch.where(judged.view(shape), right, tensor)

    def _run(self, inputs: Mapping[str, Any], look: Look) -> Tensor:
        """Logits of a pass in which ``look`` sees, and may change, each tensor before and behind each module."""
        calls = Counter[str]()

        def looked_at(name: str, goes_in: bool, values: Any) -> Any:
            def change(path: tuple[Any, ...], tensor: Tensor) -> Tensor:
                return look((name, calls[name], goes_in, path), tensor) if tensor.is_floating_point() else tensor

            return mapped(values, change)

        def before(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            calls[name] += 1
            return looked_at(name, True, (args, kwargs))

        def behind(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            return looked_at(name, False, output)

        modules = dict(self.model.named_modules())
        sorting = tuple(f"{name}." for name, module in modules.items() if SORTED in type(module).__name__.lower())
        with ExitStack() as hooks:
            for name, module in modules.items():
                if name and not name.startswith(sorting):
                    pre = module.register_forward_pre_hook(partial(before, name), with_kwargs=True)
                    post = module.register_forward_hook(partial(behind, name), with_kwargs=True)
                    hooks.callback(pre.remove)
                    hooks.callback(post.remove)
            logits: Tensor = self.model(**inputs)["logits"][0]
        return logits


def _gradients_error(model: nn.Module, samples: Sequence[Mapping[str, Any]], pack: Mapping[str, Any]) -> float | None:
    """Distance of the pack's gradients from the sum of its samples', of the weight that is off most."""
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not weights:
        return None
    generator, alone, factors = torch.Generator().manual_seed(0), [torch.zeros_like(each) for each in weights], []
    for sample in samples:
        logits = model(**sample)["logits"][0]
        factors.append(torch.randn(logits.shape, generator=generator).to(logits))
        found = torch.autograd.grad((logits * factors[-1]).sum(), weights, materialize_grads=True)
        alone = [one + other for one, other in zip(alone, found, strict=True)]
    logits = model(**pack)["logits"][0]
    packed = torch.autograd.grad((logits * torch.cat(factors)).sum(), weights, materialize_grads=True)
    # Weights that hardly matter have gradients of rounding alone: all are measured by the mean weight's norm.
    norms = [float(each.float().norm()) for each in alone]
    least = TOLERANCES[4] * sum(norms) / max(sum(norm > 0 for norm in norms), 1)
    return max(
        float((one - other).float().norm()) / max(norm, least)
        for one, other, norm in zip(packed, alone, norms, strict=True)
    )
