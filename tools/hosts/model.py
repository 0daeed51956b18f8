"""A tiny language model with random weights and sums to learn: python tools/hosts/model.py FOLDER."""

import json
import sys
from pathlib import Path

from transformers import Qwen2Config, Qwen2ForCausalLM

from omnibal.demo import train_tokenizer


def main() -> None:
    """Write ``model`` and ``data.jsonl``."""
    folder = Path(sys.argv[1])
    pairs = [(a, b) for a in range(12) for b in range(8)]
    sums = [(f"what is {a} plus {b} ? " * (1 + a % 4), f"it is {a + b} . " * (1 + b)) for a, b in pairs]
    tokenizer = train_tokenizer(text for sum_ in sums for text in sum_)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    for part in (Qwen2ForCausalLM(config), tokenizer):
        part.save_pretrained(folder / "model")
    with (folder / "data.jsonl").open("w") as file:
        for question, answer in sums:
            turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
            file.write(json.dumps({"messages": turns}) + "\n")


if __name__ == "__main__":
    main()
