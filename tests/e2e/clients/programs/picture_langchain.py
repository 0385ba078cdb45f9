"""LangChain's own image block over OpenAI's chat API, OpenAI's responses and Anthropic's messages."""

import base64
import sys
from pathlib import Path

from langchain_core.messages import HumanMessage

url, name, kind = sys.argv[1:4]
if kind == "anthropic":
    from langchain_anthropic import ChatAnthropic

    model = ChatAnthropic(model=name, base_url=url, api_key="none", max_retries=0, max_tokens=100)
else:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(
        model=name, base_url=url + "/v1", api_key="none", max_retries=0, use_responses_api=kind == "responses"
    )
data = base64.b64encode(Path("sign.png").read_bytes()).decode()
content = [
    {"type": "text", "text": "What does it say?"},
    {"type": "image", "base64": data, "mime_type": "image/png"},
]
answer = model.invoke([HumanMessage(content=content)])
print(answer.text if isinstance(answer.text, str) else answer.text())
