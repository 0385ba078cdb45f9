"""Atomic Agents over instructor: an agent whose answers are objects of a schema, enforced by the server."""

import sys

import instructor
from atomic_agents import AgentConfig, AtomicAgent, BasicChatInputSchema, BasicChatOutputSchema
from openai import OpenAI

url, model = sys.argv[1:]
client = instructor.from_openai(
    OpenAI(base_url=url + "/v1", api_key="none", max_retries=0), mode=instructor.Mode.JSON_SCHEMA
)
agent = AtomicAgent[BasicChatInputSchema, BasicChatOutputSchema](AgentConfig(client=client, model=model))
for _ in range(3):
    answer = agent.run(BasicChatInputSchema(chat_message="What is the weather?"))
print(answer.chat_message)
