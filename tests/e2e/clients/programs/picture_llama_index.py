"""LlamaIndex: a block of a picture, by its path."""

import sys

from llama_index.core.llms import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike

url, name = sys.argv[1:3]
model = OpenAILike(
    model=name, api_base=url + "/v1", api_key="none", is_chat_model=True, max_retries=0, context_window=8192
)
message = ChatMessage(blocks=[TextBlock(text="What does it say?"), ImageBlock(path="sign.png")])
print(model.chat([message]).message.content)
