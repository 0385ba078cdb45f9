"""A conversation's prompt: as text that the chat template writes, and as token ids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

from moeserve.httpserver.generation.chat.chat_formats import ChatFormats
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.chat.picture_tokens import ChatTokens
from moeserve.httpserver.generation.chat.solar_tokens import without_budget
from moeserve.httpserver.generation.chat.template_efforts import SWITCHES, VARIABLE
from moeserve.httpserver.generation.chat.thinking_tokens import template_effort
from moeserve.httpserver.generation.engine.picture_client import EncodedPicture, PictureClient
from moeserve.httpserver.generation.request.asked import Asked, ChatPrompt
from moeserve.httpserver.generation.request.pictures import Picture, PicturedText, is_video, split_at_marks
from moeserve.httpserver.transport.errors import invalid
from moeserve.messages.pictures import MOST_PICTURES
from moeserve.messages.prompt_embeddings import MOST_BYTES

# Stands for a tool's or an assistant's picture or video if the model sees none.
UNSEEN: Final = "[a {}, which this model cannot see]"


async def encode(
    text: ModelText, limit: int, asked: Asked, prompt: ChatPrompt, client: PictureClient | None
) -> ChatTokens:
    """Returns the conversation as token ids. Raises ApiError: 400 for more than about `limit` tokens without pictures,
    503 if no picture can be encoded now. client: None if the model does not see pictures."""
    pieces = await render(text, limit, asked, prompt)
    if text.pictures is None or not prompt.pictures:
        return ChatTokens(await text.encode_chat(pieces, asked.caller.tenant, asked.cache_salt))
    return await _encode_pictures(text, asked, pieces, client)


async def encode_plain(
    text: ModelText, limit: int, asked: Asked, prompt: PicturedText, client: PictureClient | None
) -> ChatTokens:
    """Returns a text with pictures as token ids, without the chat template. Raises ApiError; see `encode`."""
    _check_sees(text, asked, asked.pictures)
    text.check_length(prompt.text, limit, asked.prompt_param)
    return await _encode_pictures(text, asked, [prompt.text], client, add_special=True)


async def _encode_pictures(
    text: ModelText,
    asked: Asked,
    pieces: list[str],
    client: PictureClient | None,
    *,
    add_special: bool = False,
) -> ChatTokens:
    """Has the pictures encoded, and returns the pieces' tokens and spans. Raises ApiError."""
    assert client is not None, "the text has tokens for pictures"
    param = asked.prompt_param
    if len(asked.pictures) > MOST_PICTURES:
        raise invalid(param, f"has {len(asked.pictures)} pictures; at most {MOST_PICTURES} are taken")
    if asked.truncate_prompt_tokens is not None:
        raise invalid("truncate_prompt_tokens", "cannot be combined with pictures")
    pictures: dict[str, EncodedPicture] = {}
    for one in asked.pictures:
        pictures[one.mark] = await client.encode(one, asked.caller.tenant, param)
        if sum(each.num_bytes for each in pictures.values()) > MOST_BYTES:
            raise invalid(param, f"has pictures whose embeddings take more than {MOST_BYTES >> 20} MiB")
    return await text.encode_pictures(pieces, pictures, param, add_special=add_special)


async def render(text: ModelText, limit: int, asked: Asked, prompt: ChatPrompt) -> list[str]:
    """Returns the text that the chat template writes: see `ModelText.render_chat`. Raises ApiError 400."""
    if text.pictures is None and prompt.pictures:
        prompt = _without_past_pictures(prompt)
    _check_sees(text, asked, prompt.pictures)
    if (
        text.pictures is not None
        and not text.pictures.of_family.video
        and any(one.video is not None for one in prompt.pictures)
    ):
        message = (
            "has a video, and this model's tower reads pictures only: send some of its frames as pictures"
        )
        raise invalid(asked.prompt_param, message)
    tools = prompt.tools
    if tools.may_call and not text.formats.calls_tools:
        message = "this model's chat template shows no way to call tools (see --tool-call-parser)"
        raise invalid(tools.param, message)
    return await text.render_chat(
        list(prompt.messages),
        tools=[tool.for_template() for tool in tools.tools] or None,
        add_generation_prompt=prompt.add_generation_prompt,
        continue_final_message=prompt.continue_final_message,
        kwargs=_template_kwargs(prompt, text.formats),
        limit=limit,
        tenant=asked.caller.tenant,
        param=asked.prompt_param,
    )


def _without_past_pictures(prompt: ChatPrompt) -> ChatPrompt:
    """Returns the conversation with a note in the place of each picture and video of a tool's result or an
    assistant's message. An agent's tool may read a picture, and another model may have drawn one: it stays in the
    conversation, and if it were refused, so would be all later requests."""
    messages, unseen = [], set()
    for message in prompt.messages:
        content = message.get("content")
        if message.get("role") in ("tool", "assistant") and isinstance(content, str):
            parts = split_at_marks(content)
            unseen.update(parts[1::2])
            parts[1::2] = [UNSEEN.format("video" if is_video(mark) else "picture") for mark in parts[1::2]]
            message = {**message, "content": "".join(parts)}
        messages.append(message)
    kept = [one for one in prompt.pictures if one.mark not in unseen]
    return replace(prompt, messages=messages, pictures=kept)


def _check_sees(text: ModelText, asked: Asked, pictures: Sequence[Picture]) -> None:
    if pictures and text.pictures is None:
        message = "has a picture, and this server sees none: it runs without a vision tower (--mmproj)"
        raise invalid(asked.prompt_param, message)


def _template_kwargs(prompt: ChatPrompt, formats: ChatFormats) -> dict[str, Any]:
    kwargs = dict(prompt.template_kwargs)
    has_channels = formats.channels is not None
    wanted = prompt.thinking if formats.solar is None else without_budget(prompt.thinking, kwargs)
    effort = template_effort(wanted) if has_channels else formats.efforts.word(wanted)
    if effort is not None:
        kwargs = {VARIABLE if has_channels else formats.efforts.variable: effort} | kwargs
    if has_channels:
        return kwargs
    if prompt.thinking.is_enabled is not None:
        kwargs |= dict.fromkeys(SWITCHES, prompt.thinking.is_enabled)
    is_enabled = kwargs.get(SWITCHES[0])
    if formats.sections is not None and isinstance(is_enabled, bool):
        kwargs = {SWITCHES[1]: is_enabled} | kwargs
    if formats.thinking is not None and isinstance(is_enabled, bool):
        tags = formats.thinking.tags
        own: dict[str, Any] = {
            tags.mode: "enabled" if is_enabled else "disabled",
            tags.switch: is_enabled,
            tags.budget: -1 if is_enabled else 0,
        }
        kwargs = {name: value for name, value in own.items() if name} | kwargs
    return kwargs
