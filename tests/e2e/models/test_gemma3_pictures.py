"""Gemma 3's pictures through a whole server: transformers' first token behind a prompt of its template."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer

from tests.support.measuring.accuracy import log_softmax
from tests.support.pictures.gemma3_model import IMAGE, SIDE, TOKENS, write_model
from tests.support.pictures.picture_fixture import FIRST_TOKEN
from tests.support.servers.server import running_server

TEMPLATE = (
    "{% for m in messages %}<start_of_turn>{{ m.role }}\n{% if m.content is string %}{{ m.content | trim }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}<start_of_image>{% else %}{{ part.text | trim }}"
    "{% endif %}{% endfor %}{% endif %}<end_of_turn>\n{% endfor %}{{ '<start_of_turn>model\n' }}"
)
# Tokens of the packaged vocabulary that become the publisher's.
RENAMED = {"<tool_call>": "<start_of_image>", "</tool_call>": "<end_of_image>"}


@pytest.mark.slow
def test_the_first_token_is_transformers(tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    model = write_model(folder)
    for path in folder.glob("*token*.json"):
        text = path.read_text()
        for old, new in RENAMED.items():
            text = text.replace(old, new)
        path.write_text(text)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    pixels = np.random.default_rng(5).integers(0, 256, (2, SIDE, SIDE, 3), np.uint8)
    content: list[dict[str, Any]] = [{"type": "text", "text": "Look: "}]
    for each in pixels:
        file = io.BytesIO()
        Image.fromarray(each).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content.append({"type": "image_url", "image_url": {"url": url}})
    content.append({"type": "text", "text": " What is it?"})
    picture = f"\n\n<start_of_image>{'<start_of_image>' * TOKENS}<end_of_image>\n\n"
    prompt = f"<start_of_turn>user\nLook:{picture * 2}What is it?<end_of_turn>\n<start_of_turn>model\n"
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
    (start,) = tokenizer.encode("<start_of_image>").ids
    runs = (ids == start) & torch.nn.functional.pad(ids == start, (1, 0))[:, :-1]
    with torch.no_grad():
        values = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1.0
        logits = model(
            input_ids=torch.where(runs, IMAGE, ids), pixel_values=values, token_type_ids=runs.long()
        ).logits[0, -1]
    expected = log_softmax(logits.numpy()[None])[0]
    with running_server(folder, "--mmproj", "auto", "--max-total-tokens", "1024") as server:
        body = {"messages": [{"role": "user", "content": content}], "temperature": 0} | FIRST_TOKEN
        answer = httpx.post(f"{server.base_url}/v1/chat/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        found = answer.json()
    assert found["usage"]["prompt_tokens"] == ids.shape[1]
    tops = found["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    best = np.sort(expected)[::-1][: len(tops)]
    assert np.allclose([top["logprob"] for top in tops], best, atol=0.02)
