"""What a model without eyes can score: the yardstick for accuracy on the demo's questions."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path


def majority_accuracy(train: Iterable[Path], held_out: Iterable[Path]) -> float:
    """Share of held-out answers found by always giving the training data's most frequent answer to that question.

    Args:
        train: JSONL files of conversations.
        held_out: JSONL files of conversations, at least one answer in all.

    Returns:
        A share from 0 to 1, over all answers. A question never asked in training gets the most frequent answer of
        all; of equally frequent answers the one that comes first in training is given.
    """
    answers: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for question, answer in _exchanges(train):
        answers[question][answer] += 1
    most_frequent = {question: counts.most_common(1)[0][0] for question, counts in answers.items()}
    fallback = sum(answers.values(), Counter()).most_common(1)[0][0]
    hits = [most_frequent.get(question, fallback) == answer for question, answer in _exchanges(held_out)]
    return sum(hits) / len(hits)


def _exchanges(files: Iterable[Path]) -> Iterator[tuple[str, str]]:
    for file in files:
        with file.open() as lines:
            for line in lines:
                turns = [turn for turn in json.loads(line)["conversations"] if turn["from"] != "system"]
                yield from ((q["value"], a["value"]) for q, a in zip(turns[::2], turns[1::2], strict=True))
