"""Time and peak memory of final norm, head and loss: all rows, target rows, torch's own function; see README.md."""

import time
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch.nn import functional

from omnibal import loss as loss_module
from omnibal.formats.collate import IGNORED
from omnibal.loss import summed_loss, targets_of
from omnibal.memory import footprint
from omnibal.passes import DevicePeak
from tools.bench import head, line, table

MIB = 2**20
VOCABULARIES, SHARES = (32_000, 92_544, 151_936), (0.05, 0.1, 0.2, 0.33, 0.5, 1.0)
CHUNKS = (64, 256, 1024, 4096)
Loss = Callable[[nn.Linear, Tensor, Tensor], Tensor]


def all_rows(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    """As before: logits of all rows, and the softmax of those with a target."""
    logits, targets = head(hidden), targets_of(labels)
    chosen = logits[0].index_select(0, targets["target_rows"]).float()
    return functional.cross_entropy(chosen, targets["targets"], reduction="sum")


def target_rows(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    """As now."""
    targets = targets_of(labels)
    rows = hidden[0].index_select(0, targets["target_rows"])
    return summed_loss(head, list(head.parameters()), rows, targets["targets"])


def of_torch(head: nn.Linear, hidden: Tensor, labels: Tensor) -> Tensor:
    """Target rows by torch's own function, chunks chosen by itself."""
    targets = targets_of(labels)
    rows, options = hidden[0].index_select(0, targets["target_rows"]), nn.LinearCrossEntropyOptions()
    return functional.linear_cross_entropy(rows, head.weight, targets["targets"], reduction="sum", options=options)


class Bench:
    """A norm and a head on a pack whose last tokens are targets."""

    def __init__(self, vocabulary: int, width: int, tokens: int, share: float, dtype: torch.dtype) -> None:
        torch.manual_seed(0)
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        options = {"device": self.device, "dtype": dtype}
        self.norm, self.head = nn.RMSNorm(width, **options), nn.Linear(width, vocabulary, bias=False, **options)
        self.hidden = torch.randn(1, tokens, width, **options, requires_grad=True)
        self.labels = torch.randint(vocabulary, (1, tokens), device=self.device)
        self.labels[:, : tokens - max(1, round(share * (tokens - 1)))] = IGNORED

    def run(self, loss: Loss) -> None:
        """Forward and backward."""
        loss(self.head, self.norm(self.hidden), self.labels).backward()

    def seconds(self, loss: Loss) -> float:
        """Of the processor, on a CPU."""
        clock = time.process_time
        if self.device.type == "cuda":
            torch.cuda.synchronize()
            clock = time.perf_counter
        began = clock()
        self.run(loss)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return clock() - began

    def peak_bytes(self, loss: Loss) -> int:
        """Beside parameters, their sums of gradients and the input."""
        held = [*self.norm.parameters(), *self.head.parameters(), self.hidden]
        held += [tensor.grad for tensor in held if tensor.grad is not None]
        with DevicePeak(self.device, held) as meter:
            self.run(loss)
        return meter.peak_bytes - sum(tensor.nbytes for tensor in held)

    def compare(self, losses: list[Loss], repetitions: int) -> tuple[list[float], list[int]]:
        """Median seconds, taken in turn, and peaks; gradients are summed, as those of a step's later micro-batches."""
        for loss in losses:
            self.run(loss)
        rounds = [[self.seconds(loss) for loss in losses] for _ in range(repetitions)]
        return [median(column) for column in zip(*rounds, strict=True)], [self.peak_bytes(loss) for loss in losses]


def compared(
    vocabularies: Sequence[int], shares: Sequence[float], width: int, tokens: int, dtype: torch.dtype, repetitions: int
) -> Iterator[dict[str, Any]]:
    """All ways beside each other, a row for each vocabulary and share of targets."""
    ways: list[Loss] = [all_rows, target_rows]
    ways += [of_torch] if hasattr(functional, "linear_cross_entropy") else []
    for vocabulary in vocabularies:
        for share in shares:
            seconds, peaks = Bench(vocabulary, width, tokens, share, dtype).compare(ways, repetitions)
            row: dict[str, Any] = {"vocabulary": vocabulary, "targets": f"{share:.0%}"}
            for unit, (first, *others) in (("seconds", seconds), ("MiB", [peak / MIB for peak in peaks])):
                row[f"{unit} before"] = f"{first:.3g}"
                row |= {
                    f"{unit} {name}": f"× {found / first:.2f}"
                    for name, found in zip(("now", "of torch"), others, strict=False)
                }
            yield row


def main(
    width: int = 512,
    tokens: int = 1024,
    repetitions: int = 3,
    bfloat16: Annotated[bool, typer.Option()] = False,
    vocabulary: Annotated[list[int] | None, typer.Option(help="Words; 32,000 to 151,936.")] = None,
    share: Annotated[list[float] | None, typer.Option(help="Of tokens that are targets; 5 to 100 %.")] = None,
) -> None:
    """Print tables as Markdown; those of bfloat16 are for GPUs, as CPUs emulate it."""
    torch.set_num_threads(1)
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    rows = compared(vocabulary or VOCABULARIES, share or SHARES, width, tokens, dtype, repetitions)
    for number, row in enumerate(rows):
        if number == 0:
            print(head(list(row)))
        print(line(row.values()), flush=True)
    _chunks(width, dtype, repetitions)


def _chunks(width: int, dtype: torch.dtype, repetitions: int) -> None:
    """What the number of rows of a chunk does to 4096 targets."""
    bench, rows = Bench(VOCABULARIES[0], width, CHUNKS[-1] + 1, 1.0, dtype), []
    for chunk in CHUNKS:
        loss_module.LOSS_ROWS = chunk
        (seconds,), (peak,) = bench.compare([target_rows], repetitions)
        rows.append((chunk, seconds, peak))
    loss_module.LOSS_ROWS = footprint.LOSS_ROWS
    print()
    cells = [(chunk, f"× {seconds / rows[-1][1]:.2f}", f"{peak / MIB:.0f}") for chunk, seconds, peak in rows]
    print(table(("rows at a time", "seconds of 4096", "MiB"), cells))


if __name__ == "__main__":
    typer.run(main)
