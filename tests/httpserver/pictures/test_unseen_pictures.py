"""Conversations with pictures, on a server without a vision tower."""

from __future__ import annotations

from typing import Any

from moeserve.httpserver.generation.chat.chat_prompt import UNSEEN
from tests.support.pictures.picture_bodies import BASE64
from tests.support.servers.http_harness import NAME, http_server, tokens_of

CALL = {"id": "toolu_1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
URL_OF_FILE = {"url": f"data:image/png;base64,{BASE64}"}
SOURCE = {"type": "base64", "media_type": "image/png", "data": BASE64}
# A tool has read a picture.
OF_TOOLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "user", "content": "Look."},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {
                "role": "tool",
                "tool_call_id": "toolu_1",
                "content": [
                    {"type": "text", "text": "sign.png"},
                    {"type": "image_url", "image_url": URL_OF_FILE},
                ],
            },
        ],
    },
    "/v1/messages": {
        "max_tokens": 4,
        "messages": [
            {"role": "user", "content": "Look."},
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "toolu_1", "name": "read", "input": {}}],
            },
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "toolu_1",
                        "content": [
                            {"type": "text", "text": "sign.png"},
                            {"type": "image", "source": SOURCE},
                        ],
                    }
                ],
            },
        ],
    },
    "/v1/responses": {
        "input": [
            {"role": "user", "content": "Look."},
            {"type": "function_call", "call_id": "toolu_1", "name": "read", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "toolu_1",
                "output": [
                    {"type": "input_text", "text": "sign.png"},
                    {"type": "input_image", "image_url": URL_OF_FILE["url"]},
                ],
            },
        ],
    },
}


def test_a_picture_that_a_tool_has_read_does_not_end_the_conversation() -> None:
    """anthropics/claude-code#56016 and many like it: it stays in the history, and each later request had a 400."""
    with http_server() as with_none:
        for path, body in OF_TOOLS.items():
            answer = with_none.post(path, {"model": NAME} | body)
            assert answer.status_code == 200, answer.text
            prompt = with_none.tokenizer.decode(tokens_of(with_none.requests[-1]), skip_special=False)
            assert "sign.png" + UNSEEN.format("picture") in prompt.replace("\n", ""), path
        body = OF_TOOLS["/v1/chat/completions"]
        asked = {"role": "user", "content": [{"type": "image_url", "image_url": URL_OF_FILE}]}
        answer = with_none.post(
            "/v1/chat/completions", {"model": NAME, "messages": [*body["messages"], asked]}
        )
        assert answer.status_code == 400
        assert "this server sees none" in answer.text


def test_a_tools_video_and_a_picture_that_another_model_has_drawn_are_notes() -> None:
    video = {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,AAAA"}}
    drawn = {"type": "image_url", "image_url": URL_OF_FILE}
    user, called, result = OF_TOOLS["/v1/chat/completions"]["messages"]
    messages = [user, called, result | {"content": [video]}, {"role": "assistant", "content": [drawn]}, user]
    with http_server() as with_none:
        answer = with_none.post("/v1/chat/completions", {"model": NAME, "messages": messages})
        assert answer.status_code == 200, answer.text
        prompt = with_none.tokenizer.decode(tokens_of(with_none.requests[-1]), skip_special=False)
    at = [prompt.find(UNSEEN.format(what)) for what in ("video", "picture")]
    assert 0 < at[0] < at[1]
