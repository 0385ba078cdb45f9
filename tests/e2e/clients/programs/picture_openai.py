"""OpenAI's library: a picture in a chat, streamed, and in responses, parsed into its types."""

import base64
import sys
from pathlib import Path

from openai import OpenAI

url, name, kind = sys.argv[1:4]
client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
picture = "data:image/png;base64," + base64.b64encode(Path("sign.png").read_bytes()).decode()
if kind == "chat":
    content = [
        {"type": "text", "text": "What does it say?"},
        {"type": "image_url", "image_url": {"url": picture, "detail": "high"}},
    ]
    parts = client.chat.completions.create(
        model=name, messages=[{"role": "user", "content": content}], max_tokens=100, stream=True
    )
    print("".join(part.choices[0].delta.content or "" for part in parts if part.choices))
else:
    content = [
        {"type": "input_text", "text": "What does it say?"},
        {"type": "input_image", "image_url": picture, "detail": "auto"},
    ]
    answer = client.responses.create(model=name, input=[{"role": "user", "content": content}])
    print(answer.output_text)
