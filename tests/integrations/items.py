"""Items of a user's dataset and a user's collator, for small models of every family that packs."""

import torch

from tests.vlm.families import IMAGE_TOKEN, family_samples

SHAPES = [
    ([(40, 23)], 7),
    ([], 5),
    ([(13, 37), (60, 61), (9, 50)], 9),
    ([(64, 15)], 4),
    ([], 12),
    ([(12, 12), (70, 11)], 6),
    ([(67, 71)], 5),
    ([], 30),
    ([(20, 20)], 11),
    ([], 8),
    ([(30, 50)], 6),
]


def items_of(model_type):
    return family_samples(model_type, SHAPES)


class Collate:
    """Pads to a multiple of eight, as many collators do."""

    def __init__(self, model_type):
        self.with_types = "qwen" in model_type

    def __call__(self, items):
        longest = -max(len(item["input_ids"]) for item in items) // 8 * -8
        batch = {"input_ids": self.padded(items, "input_ids", 0, longest)}
        batch["labels"] = self.padded(items, "labels", -100, longest)
        lengths = torch.tensor([len(item["input_ids"]) for item in items])
        batch["attention_mask"] = (torch.arange(longest) < lengths[:, None]).long()
        if self.with_types:
            batch["mm_token_type_ids"] = (batch["input_ids"] == IMAGE_TOKEN).long()
        for name in ("pixel_values", "image_grid_thw"):
            found = [item[name] for item in items if item.get(name) is not None]
            if found:
                batch[name] = torch.cat(found)
        return batch

    @staticmethod
    def padded(items, name, value, longest):
        rows = torch.full((len(items), longest), value)
        for row, item in zip(rows, items, strict=True):
            row[: len(item[name])] = item[name]
        return rows
