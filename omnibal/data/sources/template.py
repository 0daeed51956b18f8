"""Conversations as the chat template of a tokenizer writes them, whatever the model."""

from dataclasses import dataclass
from typing import Any

from omnibal.data.sources.chat import IMAGE_MARK, Conversation, Rendered
from omnibal.data.sources.folder import said
from omnibal.errors import ConfigError

Message = dict[str, Any]
PROBE = "probe"


def text_start(tokenizer: Any) -> str:
    """The token that a tokenizer puts before every text; none in Qwen2's."""
    return str(tokenizer.bos_token) if tokenizer("")["input_ids"] == [tokenizer.bos_token_id] else ""


@dataclass(frozen=True)
class ChatTemplate:
    """Renders by a tokenizer's chat template.

    Attributes:
        tokenizer: A transformers tokenizer that has one.
        image_token: What its template writes for an image, among brackets perhaps.
        breaks_line: Whether it writes a line break after an image; the one after an image's mark is then left out.
        start: What tokenizers put before a text and the template leaves to them.
    """

    tokenizer: Any
    image_token: str
    breaks_line: bool
    start: str

    @classmethod
    def of(cls, tokenizer: Any, image_token: str) -> "ChatTemplate":
        """Finds out how a tokenizer's template writes images.

        Raises:
            ConfigError: If there is no template, or it does not write ``image_token`` for an image or what assistants
                answer.
        """
        if not tokenizer.chat_template:
            raise ConfigError("tokenizer must have a chat template, got none")
        content = [{"type": "image"}, {"type": "text", "text": PROBE}]
        template = cls(tokenizer, image_token, breaks_line=False, start="")
        try:
            probe = template._text([{"role": "user", "content": content}])
            answered = template._text([template._message("user", "question"), template._message("assistant", PROBE)])
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if probe.count(image_token) != 1:
            raise ConfigError(f"chat template must write {image_token} for an image, got {probe!r}")
        if PROBE not in answered:
            raise ConfigError(f"chat template must write what an assistant answers, got {answered!r:.200}")
        between = probe.partition(image_token)[2].partition(PROBE)[0]
        start = text_start(tokenizer)
        return cls(tokenizer, image_token, between.endswith("\n"), "" if start and probe.startswith(start) else start)

    def render(self, conversation: Conversation) -> Rendered:
        """The conversation's text; a target is what the template adds for an answer, but for spaces at its end.

        Raises:
            ValueError: If the template does not write turns one after another (some leave parts of earlier turns out),
                or refuses them.
        """
        messages = [self._message(turn.role, turn.text) for turn in conversation.turns]
        targets, text = [], ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._text(messages[:number], add_generation_prompt=True)
            answered = self._text(messages[: number + 1])
            if not (prompt.startswith(text) and answered.startswith(prompt)):
                raise ValueError(f"chat template must write one turn after another, got {answered!r:.200}")
            text = answered
            targets.append((len(self.start) + len(prompt), len(self.start) + len(answered.rstrip())))
        return Rendered(self.start + text, tuple(targets))

    def _text(self, messages: list[Message], **options: Any) -> str:
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, **options))
        except Exception as error:  # templates are programs, and may refuse a conversation by any error
            raise ValueError(f"chat template must take the conversation, got {said(error)}") from error

    def _message(self, role: str, text: str) -> Message:
        before, *after = text.split(IMAGE_MARK) if role == "user" else [text]
        content = [{"type": "text", "text": before}] if before else []
        for part in after:
            rest = part.removeprefix("\n") if self.breaks_line else part
            content += [{"type": "image"}, *([{"type": "text", "text": rest}] if rest else [])]
        return {"role": role, "content": content}
