"""Ollama's Python client: a picture by its path in a chat, by its bytes in a prompt."""

import sys
from pathlib import Path

from ollama import Client

url, name, kind = sys.argv[1:4]
client = Client(host=url)
assert "vision" in client.show(name).capabilities
if kind == "chat":
    message = {"role": "user", "content": "What does it say?", "images": ["sign.png"]}
    print(client.chat(name, messages=[message]).message.content)
else:
    print(client.generate(name, prompt="What does it say?", images=[Path("sign.png").read_bytes()]).response)
