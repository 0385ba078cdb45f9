"""Text to token ids and back; texts that may be long are never handled on the event loop's thread.

Uses `encode_batch` and not `encode`, because the former releases the GIL (measured on 1.8 MB of text: the loop waits at
most 14 ms instead of 890 ms).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from moeserve.httpserver.generation.chat_formats import ChatFormats
from moeserve.httpserver.transport.errors import ApiError
from moeserve.httpserver.transport.keys import key_name
from moeserve.tokenizer.errors import TemplateError
from moeserve.tokenizer.renderer import ChatRenderer
from moeserve.tokenizer.text_tokenizer import TextTokenizer


@dataclass(frozen=True)
class ModelText:
    """The served model's tokenizer and chat template."""

    tokenizer: TextTokenizer
    renderer: ChatRenderer
    formats: ChatFormats
    longest_token: int  # bytes

    @classmethod
    def of(cls, tokenizer: TextTokenizer, renderer: ChatRenderer, formats: ChatFormats) -> ModelText:
        return cls(tokenizer, renderer, formats, max(map(len, tokenizer.vocabulary.token_bytes)))

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocabulary.size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.tokenizer.vocabulary.eos_ids

    async def encode(
        self, texts: Sequence[str], *, limit: int, param: str, add_special: bool = True
    ) -> list[list[int]]:
        """Returns the ids of each text. Raises ApiError 400 for a text that cannot fit into `limit` tokens, before it
        costs time and memory; `RequestBuilder` makes the exact check. (NFC, the first step of tokenisation, could
        shorten a text only where its characters are no long tokens.)"""
        for text in texts:
            if len(text) > limit * self.longest_token:
                message = (
                    f"{param}: {len(text)} characters cannot fit into this model's maximum context length of "
                    f"{limit} tokens, of at most {self.longest_token} characters each"
                )
                raise ApiError(400, message, param=param, code="context_length_exceeded")
        encoded = await asyncio.to_thread(self.tokenizer.encode_batch, texts)
        vocabulary = self.tokenizer.vocabulary
        if add_special and vocabulary.add_bos and vocabulary.bos_id is not None:
            return [[vocabulary.bos_id, *ids] for ids in encoded]
        return encoded

    async def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, control tokens included. The ids must be in the vocabulary."""
        return await asyncio.to_thread(self.tokenizer.decode, ids, False)

    async def encode_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool,
        kwargs: dict[str, Any],
        limit: int,
        add_special: bool = False,
        param: str = "messages",
        continue_final_message: bool = False,
    ) -> list[int]:
        """Returns the ids of a conversation as the chat template writes it, control tokens included; with
        `continue_final_message`, as far as the last message's content. Raises ApiError 400, also if the template fails
        on it or takes too long."""
        mark = secrets.token_hex(16) if continue_final_message else ""
        if mark:
            messages = [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + mark}]
        messages, tools = self.formats.for_template(messages, tools, self.renderer.source)
        try:
            text = await self.renderer.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                kwargs=kwargs,
                tenant=key_name.get(),
            )
        except TemplateError as error:
            raise ApiError(400, f"{param}: {error}", param=param, code="chat_template_error") from error
        if mark:
            text, found, _ = text.rpartition(mark)
            if not found:
                message = f"{param}: the chat template leaves the last message out, so it cannot be continued"
                raise ApiError(400, message, param=param, code="chat_template_error")
        (ids,) = await self.encode([text], limit=limit, param=param, add_special=add_special)
        return ids

    def token_text(self, token_id: int) -> str:
        """Returns the token's own text: U+FFFD where its bytes are not whole characters, "" for padding of the
        logits."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id) if token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self.tokenizer.vocabulary.special
