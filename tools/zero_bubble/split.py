"""What splitting a backward pass costs, for each kind of layer, on this machine; see README.md."""

import argparse
import json
from pathlib import Path
from statistics import median

import torch
from small import model, pack

from omnibal.vlm import Payload
from omnibal.vlm.layer_run import LayerRun

ROUNDS = 7


def main() -> None:
    """Measure one layer of each kind on what the layers before it put out; write medians over rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, help="JSON of all figures")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    vlm, given = model(), pack(0)
    payload = Payload.of_pack(given)
    rows, seen = [], set[str]()
    for index, record in enumerate(vlm.records):
        layer = vlm.build_layer(index, seed=0)
        if record.kind not in seen:
            seen.add(record.kind)
            labels = given["labels"].clone() if index == len(vlm.records) - 1 else None
            rows.append(
                {"kind": record.kind} | measure(LayerRun(layer, payload, vlm.layout(index + 1), index == 0, labels))
            )
            print(rows[-1], flush=True)
        with torch.no_grad():
            payload = layer(payload)
    arguments.file.write_text(json.dumps(rows, indent=1) + "\n")


def measure(trial: LayerRun) -> dict[str, float]:
    """Rounds of whole and of split backward passes in turn: medians in seconds, and of their ratio."""
    rounds = [trial.measure() for _ in range(ROUNDS)]
    whole = [row.backward.seconds for row in rounds]
    split = [(row.backward_split.seconds, row.weights.seconds) for row in rounds]
    return {
        "forward_seconds": median(row.forward.seconds for row in rounds),
        "backward_seconds": median(whole),
        "inputs_seconds": median(inputs for inputs, _ in split),
        "weights_seconds": median(weights for _, weights in split),
        "split_over_whole": median(sum(parts) / one for parts, one in zip(split, whole, strict=True)),
        "pending_bytes": rounds[0].pending_bytes,
        "kept_bytes": rounds[0].kept_bytes["none"],
    }


if __name__ == "__main__":
    main()
