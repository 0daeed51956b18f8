"""What becomes of samples that are longer than a trainer's limit of tokens: each trainer does something else.

Sources: ms-swift ``swift/template/base.py`` (``truncation_strategy``; what it cuts leaves image tokens alone);
LLaMA-Factory ``data/processor/{supervised,processor_utils}.py`` (``infer_seqlen`` shares the limit between question and
answer); TRL ``trainer/sft_trainer.py`` 1.16; Qwen-VL ``qwenvl/data/data_processor.py``; InternVL
``internvl/train/{dataset,internvl_chat_finetune}.py``, which draws another sample where image tokens are cut; LLaVA
``llava_arch.py``, which cuts embeddings, and images with them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from omnibal.data.lengths import IntArray, SampleLengths
from omnibal.errors import DataError

Mask = npt.NDArray[np.bool_]
Keeps = Literal["nothing", "all", "start", "start and images", "end and images", "question and answer"]
"""What is kept of a sample over the limit."""
CutImages = Literal["fails", "is left out", "goes on"]
"""What a run does at a sample whose image tokens were cut: fail, take another sample, or cut the images, too."""


CUTOFF: Final = "cutoff"  # the option of `omnibal advise`, where no trainer's file says more


class Kept(NamedTuple):
    """Sizes of samples as they are trained, and which of them are not."""

    tokens: IntArray
    targets: IntArray | None
    left_out: Mask
    broken: Mask  # samples of whose image tokens some are cut, while the images stay whole


@dataclass(frozen=True)
class Overlong:
    """What a trainer does with samples over its limit."""

    setting: str = CUTOFF  # the setting that says the limit, as the trainer calls it
    keeps: Keeps = "start"
    cut_images: CutImages = "fails"

    def apply(self, tokens: IntArray, targets: IntArray | None, images: IntArray, limit: int) -> Kept:
        """Cut samples at a limit of tokens: ``images`` of each come first, ``targets`` last (None if not counted)."""
        over, none = tokens > limit, np.zeros(len(tokens), dtype=bool)
        if self.keeps == "nothing":
            return Kept(tokens, targets, over, none)
        if self.keeps == "all":
            return Kept(tokens, targets, none, none)
        if self.keeps == "question and answer" and targets is not None:
            question, answer = _shared(tokens - targets, targets, limit)
            return Kept(
                np.where(over, question + answer, tokens), np.where(over, answer, targets), none,
                over & (images > question),
            )  # fmt: skip
        saves_images = self.keeps in ("start and images", "end and images")
        left = np.where(over, np.maximum(limit, images) if saves_images else limit, tokens)
        broken = none if saves_images or self.cut_images == "goes on" else images > left
        if targets is not None:
            own = left - images if self.keeps == "end and images" else targets - (tokens - left)
            targets = np.where(over, np.clip(own, 0, targets), targets)
        return Kept(left, targets, none, broken)

    def cut(self, lengths: SampleLengths, images: IntArray, limit: int) -> tuple[SampleLengths, IntArray, str]:
        """Samples as they are trained, which of all these are, and what became of the others, in words."""
        targets = None if lengths.target_tokens is None else lengths.target_tokens.astype(np.int64)
        tokens = lengths.llm_tokens.astype(np.int64)
        kept = self.apply(tokens, targets, images, limit)
        told = self.told(limit, int((tokens > limit).sum()), kept)
        stay = np.flatnonzero(~(kept.left_out | kept.broken))
        if not len(stay):
            raise DataError(f"{self.setting} must leave samples to train on, got {limit:,}: {told}")
        changed = {"llm_tokens": kept.tokens} | ({} if kept.targets is None else {"target_tokens": kept.targets})
        cut = SampleLengths(**{**lengths.columns(), **changed}, source_names=lengths.source_names)
        return cut.take(stay), stay, told

    def told(self, limit: int, over: int, kept: Kept) -> str:
        """What became of ``over`` of the samples, in words."""
        count, broken, words = len(kept.tokens), int(kept.broken.sum()), list[str]()
        at = f"{limit:,} tokens" + (f" ({self.setting})" if self.setting != CUTOFF else "")
        if self.keeps == "nothing":
            words.append(f"{over:,} of {count:,} samples are over {at} and left out")
        elif self.keeps == "all":
            words.append(f"{over / count:.1%} are over {at}, which does not cut them")
        else:
            whole = ", their images whole" if self.keeps.endswith("and images") else ""
            words.append(f"{over / count:.1%} are cut at {at}{whole}")
        if broken:
            fate = "which ends a run: raise it" if self.cut_images == "fails" else "and others take their place"
            words.append(
                f"{broken:,} of {count:,} have more image tokens than that leaves, {fate}; they are left out here"
            )
        return "; ".join(words)


def _shared(question: IntArray, answer: IntArray, limit: int) -> tuple[IntArray, IntArray]:
    """Tokens that LLaMA-Factory keeps of questions and answers: whichever is under half of the limit stays whole."""
    most = np.where(answer * 2 < limit, limit, limit - question)
    both = (answer * 2 >= limit) & (question * 2 >= limit)
    most = np.where(both, limit * answer // np.maximum(question + answer, 1), most)
    kept = np.minimum(most, answer)
    return np.minimum(np.maximum(limit - kept, 0), question), kept


STRATEGIES: Final[Mapping[str, Keeps]] = {
    "delete": "nothing", "raise": "nothing", "left": "end and images", "right": "start and images", "split": "nothing",
}  # fmt: skip
"""ms-swift's ``truncation_strategy``; "split" is for pre-training on text."""
# Limits of tokens: of TRL's SFTTrainer, and of the training code of InternVL, of Qwen-VL and LLaVA.
LIMITS: Final = ("max_length", "max_seq_length", "model_max_length")
_TRL: Final = (
    "assistant_only_loss",
    "completion_only_loss",
    "dataset_text_field",
    "packing_strategy",
    "truncation_mode",
)
_LLAVA: Final = ("vision_tower", "mm_projector_type", "mm_vision_select_layer", "pretrain_mm_mlp_adapter")
TRL_LENGTH: Final = 1024


def limit_of_arguments(
    content: Mapping[str, Any], count: Callable[[Mapping[str, Any], str], int | None]
) -> tuple[int | None, Overlong | None]:
    """The limit of tokens that training code around Trainer has, and what it does with longer samples.

    ``count`` reads a positive integer by its key.
    """
    key = next((name for name in LIMITS if content.get(name) is not None), None)
    if key is None and any(name in content for name in _TRL) and "max_length" not in content:
        return TRL_LENGTH, Overlong("max_length, by TRL's default")
    if key is None:
        return None, None
    if key == "max_seq_length":  # InternVL
        return count(content, key), Overlong(key, cut_images="is left out")
    if key == "model_max_length" and any(name in content for name in _LLAVA):
        return count(content, key), Overlong(key, cut_images="goes on")
    is_whole = key == "model_max_length" and content.get("data_flatten")
    return count(content, key), Overlong(
        f"{key} under data_flatten" if is_whole else key, "all" if is_whole else "start"
    )
