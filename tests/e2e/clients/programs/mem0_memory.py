"""mem0: facts are drawn out of three conversations and remembered. The embeddings are made up."""

import sys

from langchain_core.embeddings import DeterministicFakeEmbedding
from mem0 import Memory

memory = Memory.from_config(
    {
        "llm": {
            "provider": "openai",
            "config": {"model": sys.argv[2], "openai_base_url": sys.argv[1] + "/v1", "api_key": "none"},
        },
        "embedder": {"provider": "langchain", "config": {"model": DeterministicFakeEmbedding(size=64)}},
        "vector_store": {"provider": "qdrant", "config": {"path": "memory", "embedding_model_dims": 64}},
    }
)
for said in ("I like rain.", "I live in Paris.", "I have a fox."):
    memory.add([{"role": "user", "content": said}], user_id="me")
for one in memory.get_all(filters={"user_id": "me"})["results"]:
    print(one["memory"])
