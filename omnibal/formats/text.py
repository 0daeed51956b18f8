"""Conversations as the text that a model reads, by ChatML or by a chat template, and as token ids and labels."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from omnibal.errors import ConfigError, said
from omnibal.formats.chat import IMAGE_MARK, Conversation

PROBE = "probe"
IGNORED = -100  # label of a token that carries no loss, as in transformers

Ids = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Message = dict[str, Any]


@dataclass(frozen=True)
class Rendered:
    """A conversation as one text in which every image is one token, and which characters carry loss."""

    text: str
    targets: tuple[tuple[int, int], ...]  # (start, stop) of each answer with its end-of-turn token

    def replaced(self, mark: str, texts: Sequence[str]) -> "Rendered":
        """With ``texts[k]`` in place of the ``k``-th mark; no answer holds one.

        >>> Rendered("a?b", ((2, 3),)).replaced("?", ["long"])
        Rendered(text='alongb', targets=((5, 6),))
        """
        parts = self.text.split(mark)
        if len(parts) != len(texts) + 1:
            raise ValueError(f"chat template must write {mark} for each of {len(texts)} videos, got {self.text!r:.200}")
        # A target moves by what the marks before it grow.
        growth = list(accumulate((len(text) - len(mark) for text in texts), initial=0))
        moved = [growth[self.text.count(mark, 0, start)] for start, _ in self.targets]
        targets = [(start + by, stop + by) for (start, stop), by in zip(self.targets, moved, strict=True)]
        return Rendered("".join(map("".join, zip(parts, [*texts, ""], strict=True))), tuple(targets))


Render = Callable[[Conversation], Rendered]


def text_start(tokenizer: Any) -> str:
    """The token that a tokenizer puts before every text; empty for Qwen2's tokenizer, which puts none."""
    return str(tokenizer.bos_token) if tokenizer("")["input_ids"] == [tokenizer.bos_token_id] else ""


def render_chatml(conversation: Conversation, image: str, start: str = "") -> Rendered:
    r"""Write a conversation in ChatML as Qwen2 and InternVL do; no system message is added.

    >>> from omnibal.formats.chat import Turn
    >>> turns = (Turn("user", "<image>\nWhat?"), Turn("assistant", "A cat."))
    >>> rendered = render_chatml(Conversation(turns, ()), "<img>")
    >>> rendered.text
    '<|im_start|>user\n<img>\nWhat?<|im_end|>\n<|im_start|>assistant\nA cat.<|im_end|>\n'
    >>> [rendered.text[start:stop] for start, stop in rendered.targets]
    ['A cat.<|im_end|>']
    """
    text, targets = start, []
    for turn in conversation.turns:
        text += f"<|im_start|>{turn.role}\n"
        begin = len(text)
        text += turn.text.replace(IMAGE_MARK, image) if turn.role == "user" else turn.text
        text += "<|im_end|>"
        if turn.role == "assistant":
            targets.append((begin, len(text)))
        text += "\n"
    return Rendered(text, tuple(targets))


@dataclass(frozen=True)
class ChatTemplate:
    tokenizer: Any
    template: str
    breaks_line: bool = False  # whether the template breaks the line after an image; the mark's own break is left out
    start: str = ""  # what tokenizers put before a text and the template leaves to them
    # What ends an answer where the template (LLaVA 1.5's) writes nothing: a model trained without it never stops.
    end: str = ""

    @classmethod
    def of(cls, tokenizer: Any, template: str | None, token: str, kind: str = "image") -> "ChatTemplate":
        """Find out how a template writes images (or ``"audio"``) and ends answers, by two short conversations."""
        if not template:
            raise ConfigError("tokenizer or processor must have a chat template, got none")
        written = cls(tokenizer, template)
        asked = {"role": "user", "content": [{"type": kind}, {"type": "text", "text": PROBE}]}
        try:
            probe = written._text([asked])
            answered = written._text([written._message("user", "question"), written._message("assistant", PROBE)])
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if probe.count(token) != 1:
            raise ConfigError(f"chat template must write {token} for an {kind}, got {probe!r}")
        if PROBE not in answered:
            raise ConfigError(f"chat template must write what an assistant answers, got {answered!r:.200}")
        between = probe.partition(token)[2].partition(PROBE)[0]
        start = text_start(tokenizer)
        end = "" if answered.rpartition(PROBE)[2].strip() else tokenizer.eos_token
        if end is None:
            raise ConfigError("tokenizer must have an eos_token where the chat template ends no answer, got none")
        return cls(tokenizer, template, between.endswith("\n"), "" if start and probe.startswith(start) else start, end)

    def render(self, conversation: Conversation) -> Rendered:
        """The conversation's text; a target is what the template adds for an answer, but for spaces at its end.

        An answer begins as the template's own prompt ends, also where it writes more spaces into earlier turns
        (LLaVA-OneVision's does): that is what the model will be asked with.
        """
        # An answer is what the template adds to the prompt before it: each prompt must begin with all that was
        # written until then, and each answered prompt with the prompt.
        messages = [self._message(turn.role, turn.text, conversation.marks) for turn in conversation.turns]
        targets, text, written = [], self.start, ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._text(messages[:number], add_generation_prompt=True)
            answered = self._text(messages[: number + 1])
            begin = _answer_begin(prompt, answered)
            if not prompt.startswith(written) or begin is None:
                raise ValueError(f"chat template must write one turn after another, got {answered!r:.200}")
            text += prompt[len(written) :]
            answer, rest = answered[begin:].rstrip(), answered[len(answered.rstrip()) :]
            targets.append((len(text), len(text) + len(answer) + len(self.end)))
            text += answer + (self.end or rest)
            written = answered
        return Rendered(text, tuple(targets))

    def writes(self, conversation: Conversation, render: Render) -> bool:
        expected = render(conversation).text
        for breaks_line in (True, False):
            same = ChatTemplate(self.tokenizer, self.template, breaks_line, self.start)
            messages = [same._message(turn.role, turn.text) for turn in conversation.turns]
            try:
                if same.start + same._text(messages) == expected:
                    return True
            except ValueError:  # it refuses the conversation
                continue
        return False

    def _text(self, messages: list[Message], **options: Any) -> str:
        try:
            return str(
                self.tokenizer.apply_chat_template(messages, chat_template=self.template, tokenize=False, **options)
            )
        except Exception as error:  # templates are programs, and may refuse a conversation by any error
            raise ValueError(f"chat template must take the conversation, got {said(error)}") from error

    def _message(self, role: str, text: str, marks: Sequence[str] = (IMAGE_MARK,)) -> Message:
        before, *rest = re.split(f"({'|'.join(marks)})", text) if role == "user" else [text]
        content = [{"type": "text", "text": before}] if before else []
        for mark, part in zip(rest[::2], rest[1::2], strict=True):
            behind = part.removeprefix("\n") if self.breaks_line else part
            content += [{"type": mark.strip("<>")}, *([{"type": "text", "text": behind}] if behind else [])]
        return {"role": role, "content": content}


def _answer_begin(prompt: str, answered: str) -> int | None:
    """Where an answer begins behind its prompt, before whose end there may be more spaces; None if it does not."""
    shared = len(prompt.rstrip())
    end, rest = prompt[shared:], answered[shared:]
    spaces = 0 if rest.startswith(end) else len(rest) - len(rest.lstrip(" "))
    behind = answered.startswith(prompt[:shared]) and rest[spaces:].startswith(end)
    return shared + spaces + len(end) if behind else None


class Encoded(NamedTuple):
    """Token ids (tokens,) and which of them carry loss; every image is still one token, and every run of a video."""

    ids: Ids
    is_target: Mask

    def expanded(self, image_token_id: int, image_tokens: Sequence[int]) -> "Encoded":
        """With ``image_tokens[k]`` tokens in place of image ``k``'s one."""
        times = np.ones_like(self.ids)
        times[self.ids == image_token_id] = image_tokens
        return Encoded(np.repeat(self.ids, times), np.repeat(self.is_target, times))

    @property
    def labels(self) -> Ids:
        """Ids of the targets, -100 elsewhere, (tokens,); the first token has nothing before it to be told from."""
        labels = np.where(self.is_target, self.ids, IGNORED)
        labels[:1] = IGNORED
        return labels


def encode(tokenizer: Any, samples: Sequence[Rendered]) -> list[Encoded]:
    """Tokenises texts as they stand: special tokens are those that the texts hold.

    A token is a target if its last character is: one that joins the end of a prompt to the begin of an answer (the
    space before a word) holds what the model is to say.
    """
    if not samples:
        return []
    batch = tokenizer(
        [sample.text for sample in samples],
        add_special_tokens=False,
        return_attention_mask=False,
        return_offsets_mapping=True,
    )
    return [
        Encoded(np.array(ids, dtype=np.int64), _within(np.array(offsets).reshape(-1, 2), sample.targets))
        for ids, offsets, sample in zip(batch["input_ids"], batch["offset_mapping"], samples, strict=True)
    ]


def _within(offsets: npt.NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> Mask:
    inside = np.zeros(len(offsets), dtype=np.bool_)
    for start, stop in spans:
        inside |= (offsets[:, 1] > start) & (offsets[:, 1] <= stop)
    return inside
