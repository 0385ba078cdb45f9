"""litellm: a picture to the OpenAI API and to Ollama's."""

import base64
import os
import sys
from pathlib import Path

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would fetch one at its import
import litellm

url, name, kind = sys.argv[1:4]
picture = "data:image/png;base64," + base64.b64encode(Path("sign.png").read_bytes()).decode()
content = [
    {"type": "text", "text": "What does it say?"},
    {"type": "image_url", "image_url": {"url": picture}},
]
answer = litellm.completion(
    model=f"{kind}/{name}",
    api_base=url + ("/v1" if kind == "hosted_vllm" else ""),
    api_key="none",
    messages=[{"role": "user", "content": content}],
    num_retries=0,
)
print(answer.choices[0].message.content)
