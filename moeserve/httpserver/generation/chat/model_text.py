"""Converts text to token ids and back. Texts that may be long are handled on threads other than the event loop's.

Uses `encode_batch` and not `encode`, because the former releases the GIL (measured on 1.8 MB of text: the loop waits at
most 14 ms instead of 890 ms).
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moeserve.httpserver.generation.chat.chat_formats import ChatFormats
from moeserve.httpserver.generation.chat.literal_text import LiteralText
from moeserve.httpserver.generation.chat.picture_tokens import ChatTokens, PictureTokens
from moeserve.httpserver.generation.engine.picture_client import EncodedPicture
from moeserve.httpserver.transport.errors import ApiError, Overflow
from moeserve.messages.refusal import Refusal
from moeserve.models.facts import UNKNOWN, ModelFacts
from moeserve.tokenizer.errors import TemplateError
from moeserve.tokenizer.fill_in_middle import FimTokens
from moeserve.tokenizer.renderer import ChatRenderer
from moeserve.tokenizer.text_tokenizer import TextTokenizer
from moeserve.tokenizer.token_cache import TokenCache


@dataclass(frozen=True)
class ModelText:
    """The served model's tokenizer and chat template."""

    tokenizer: TextTokenizer
    renderer: ChatRenderer
    formats: ChatFormats
    token_cache: TokenCache
    longest_token: int  # bytes
    parses_user_text: bool  # True: control tokens that users and tools spell out become tokens
    facts: ModelFacts  # for lists of models
    pictures: PictureTokens | None = None  # None: the model sees no pictures
    fim: FimTokens | None = None  # None: the model has no fill-in-the-middle

    @classmethod
    def of(
        cls,
        tokenizer: TextTokenizer,
        renderer: ChatRenderer,
        formats: ChatFormats,
        *,
        parses_user_text: bool = True,
        facts: ModelFacts = UNKNOWN,
        pictures: PictureTokens | None = None,
        fim: FimTokens | None = None,
    ) -> ModelText:
        longest = max(map(len, tokenizer.vocabulary.token_bytes))
        cache = TokenCache(tokenizer)
        return cls(tokenizer, renderer, formats, cache, longest, parses_user_text, facts, pictures, fim)

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.vocabulary.size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self.tokenizer.vocabulary.eos_ids

    @property
    def adds_bos(self) -> bool:
        """True if the model expects a begin-of-text token before a text."""
        vocabulary = self.tokenizer.vocabulary
        return vocabulary.add_bos and vocabulary.bos_id is not None

    async def encode(
        self, texts: Sequence[str], *, limit: int, param: str, add_special: bool = True
    ) -> list[list[int]]:
        """Returns the token ids of each text. Raises ApiError 400 for a text that is too long for `limit` tokens. This
        check estimates by bytes, before the text costs time and memory; `RequestBuilder` checks exactly. (NFC
        normalisation, the first step, shortens only characters that are not part of long tokens.)"""
        for text in texts:
            self.check_length(text, limit, param)
        encoded = await asyncio.to_thread(self.tokenizer.encode_batch, texts)
        return [self._begun(ids) for ids in encoded] if add_special else encoded

    def check_length(self, text: str, limit: int, param: str) -> None:
        """Raises ApiError 400 for a text that cannot fit into `limit` tokens."""
        self.check_size(len(text), limit, param)

    def check_size(self, characters: int, limit: int, param: str) -> None:
        """Raises ApiError 400 if this number of characters cannot fit into `limit` tokens."""
        if characters > limit * self.longest_token:
            message = (
                f"{param}: {characters} characters cannot fit into this model's maximum context length of "
                f"{limit} tokens, of at most {self.longest_token} characters each; shorten it"
            )
            raise ApiError(
                400,
                message,
                param=param,
                code="context_length_exceeded",
                refusal=Refusal.TOO_LONG,
                overflow=Overflow(
                    -(-characters // self.longest_token), limit
                ),  # a lower bound on the text's tokens
            )

    def _begun(self, ids: list[int]) -> list[int]:
        """Returns the ids after the begin-of-text token, if the model expects one."""
        bos_id = self.tokenizer.vocabulary.bos_id
        return ids if bos_id is None or not self.adds_bos else [bos_id, *ids]

    async def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of token ids, control tokens included. The ids must be in the vocabulary."""
        return await asyncio.to_thread(self.tokenizer.decode, ids, False)

    async def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool,
        kwargs: dict[str, Any],
        limit: int,
        tenant: str,
        param: str = "messages",
        continue_final_message: bool = False,
    ) -> list[str]:
        """Renders a conversation with the chat template, control tokens included; with `continue_final_message` only up
        to the end of the last message's content. Returns the text in pieces, cut where a spelled-out control token must
        stay text. `tenant` is `Caller.tenant`. Raises ApiError 400, also if the template fails or takes too long."""
        mark = secrets.token_hex(16) if continue_final_message else ""
        if mark:
            messages = [*messages[:-1], messages[-1] | {"content": messages[-1]["content"] + mark}]
        if self.pictures is not None:
            messages = self.pictures.text.placed(messages)
        literal = None
        if not self.parses_user_text:
            special = self.tokenizer.vocabulary.special
            literal = LiteralText(self.token_text(token_id) for token_id in special)
            messages = await asyncio.to_thread(literal.mark, messages)
        messages, tools = self.formats.for_template(messages, tools, self.renderer.source_for(tools))
        try:
            text = await self.renderer.render(
                messages,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                kwargs=kwargs,
                tenant=tenant,
            )
        except TemplateError as error:
            raise ApiError(400, f"{param}: {error}", param=param, code="chat_template_error") from error
        if mark:
            text, found, _ = text.rpartition(mark)
            if not found:
                message = (
                    f"{param}: the model's chat template leaves the last message out, so it cannot be continued; end "
                    "with a message of role user"
                )
                raise ApiError(400, message, param=param, code="chat_template_error")
        pieces = [text] if literal is None else literal.cut(text)
        self.check_length("".join(pieces), limit, param)
        return pieces

    async def encode_pictures(
        self,
        pieces: list[str],
        pictures: Mapping[str, EncodedPicture],
        param: str,
        *,
        add_special: bool = False,
    ) -> ChatTokens:
        """Tokenizes the pieces that `render_chat` returned, and replaces each picture's mark by the picture. `pictures`
        maps marks to pictures. add_special: after the begin-of-text token, if the model expects one. Raises ApiError
        400 if a mark is missing."""
        assert self.pictures is not None, "the caller knows that the model sees"
        text = "".join(pieces)
        if not all(mark in text for mark in pictures):
            message = (
                f"{param}: the model's chat template leaves a picture out; send it in a message of role user"
            )
            raise ApiError(400, message, param=param, code="chat_template_error")
        begin = self._begun([]) if add_special else []
        return await asyncio.to_thread(self.pictures.encode, self.tokenizer, pieces, pictures, begin)

    async def encode_chat(
        self, pieces: list[str], tenant: str, cache_salt: str = "", *, add_special: bool = False
    ) -> list[int]:
        """Returns the token ids of the pieces that `render_chat` returned, for a conversation without pictures. Only
        conversations of the same tenant and salt share cached tokens."""
        ids = await asyncio.to_thread(self.token_cache.encode_parts, pieces, tenant, cache_salt)
        return self._begun(ids) if add_special else ids

    def token_text(self, token_id: int) -> str:
        """Returns the text of one token, with U+FFFD for bytes that are not whole characters. Returns "" for an id
        beyond the vocabulary: the logits are padded."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokenizer.token_bytes(token_id) if token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self.tokenizer.vocabulary.special
