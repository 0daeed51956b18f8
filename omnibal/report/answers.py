"""What a model says of pictures, beside the pictures."""

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

from PIL import Image

from omnibal.errors import ConfigError
from omnibal.report.style import GREEN, VERMILION, drawing

COLUMNS, WORDS = 3, 38
"""Questions beside each other, and letters in a line of text."""
GAP = 6
"""Pixels between the images of a question."""
Answer = tuple[str, Sequence[Image.Image], str, str | None]
"""Question, images, what the model says, and the right answer where it is known."""


def plot_answers(answers: Sequence[Answer], path: Path) -> None:
    """Draw the images of each question, the question, and the answer: green if it is right, red if not.

    Raises:
        ConfigError: No question has an image.
    """
    seen = [answer for answer in answers if answer[1]]
    if not seen:
        raise ConfigError("questions must have images to draw a picture of answers, got none that has one")
    rows = -(-len(seen) // COLUMNS)
    with drawing(path, 9, 3 * rows) as figure:
        for axes in figure.subplots(rows, COLUMNS, squeeze=False).flat:
            axes.axis("off")
        for axes, (question, images, said, right) in zip(figure.axes, seen, strict=False):
            axes.imshow(_side_by_side(images))
            axes.set_title(fill(question, WORDS), fontsize=9)
            # An empty axis has no label: the answer is a text below the picture.
            words = said if right in (None, said) else f"{said} (right: {right})"
            colour = "black" if right is None else GREEN if said == right else VERMILION
            axes.text(
                0.5, -0.04, fill(words, WORDS), fontsize=9, color=colour, transform=axes.transAxes, ha="center",
                va="top",
            )  # fmt: skip


def _side_by_side(images: Sequence[Image.Image]) -> Image.Image:
    """The images of a question as one, each as high as the highest."""
    height = max(image.height for image in images)
    scaled = [image.resize((round(image.width * height / image.height), height)) for image in images]
    whole = Image.new("RGB", (sum(image.width + GAP for image in scaled) - GAP, height), "white")
    left = 0
    for image in scaled:
        whole.paste(image, (left, 0))
        left += image.width + GAP
    return whole
