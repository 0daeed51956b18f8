"""transformers: Trainer goes on from its own checkpoint of an InternVL model without the checkpoint's weights.

Title: Trainer.train(resume_from_checkpoint=...) does not load InternVL (names on disk differ from names in the model)

Trainer saves the model with `save_pretrained`, under the names on disk (`language_model.model…`). Going on, it reads
`model.safetensors` and calls `load_state_dict(..., strict=False)` with the names in memory (`model.language_model…`):
none fits, a warning lists all keys as missing and unexpected, and training goes on with the weights that the model had.
Expected: the names are converted as in `from_pretrained`, or an error.

Run: python internvl_resume.py. It saves a small random model, loads the checkpoint into another one, and compares.
"""

import sys
import tempfile

import torch
from transformers import InternVLConfig, InternVLForConditionalGeneration, Trainer, TrainingArguments

SIZES = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def small_model(seed: int) -> InternVLForConditionalGeneration:
    """Random weights of a small InternVL."""
    torch.manual_seed(seed)
    vision = {**SIZES, "image_size": [28, 28], "patch_size": [14, 14]}
    text = {"model_type": "qwen2", **SIZES, "num_key_value_heads": 2, "vocab_size": 64}
    return InternVLForConditionalGeneration(InternVLConfig(vision_config=vision, text_config=text))


def main() -> int:
    """Whether weights of the checkpoint are missing from the model that goes on."""
    saved, other = small_model(0), small_model(1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = {"use_cpu": True, "report_to": []}
        Trainer(saved, TrainingArguments(folder, **arguments)).save_model(f"{folder}/checkpoint-1")
        trainer = Trainer(other, TrainingArguments(folder, **arguments))
        trainer._load_from_checkpoint(f"{folder}/checkpoint-1")
    expected = saved.state_dict()
    lost = [name for name, weight in trainer.model.state_dict().items() if not torch.equal(weight, expected[name])]
    print(f"{len(lost)} of {len(expected)} weights are not the checkpoint's")
    return int(bool(lost))


if __name__ == "__main__":
    sys.exit(main())
