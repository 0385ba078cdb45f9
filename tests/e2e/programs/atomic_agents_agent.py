"""Atomic Agents over instructor: an agent whose answers are objects of a schema, enforced by the server."""

import sys

import instructor
from openai import OpenAI

try:  # version 2, which wants Python 3.12
    from atomic_agents import AgentConfig, AtomicAgent, BasicChatInputSchema, BasicChatOutputSchema

    Agent, Input = AtomicAgent[BasicChatInputSchema, BasicChatOutputSchema], BasicChatInputSchema
except ImportError:
    from atomic_agents.agents.base_agent import BaseAgent as Agent
    from atomic_agents.agents.base_agent import BaseAgentConfig as AgentConfig
    from atomic_agents.agents.base_agent import BaseAgentInputSchema as Input

url, model = sys.argv[1:]
client = instructor.from_openai(
    OpenAI(base_url=url + "/v1", api_key="none", max_retries=0), mode=instructor.Mode.JSON_SCHEMA
)
agent = Agent(config=AgentConfig(client=client, model=model))
for _ in range(3):
    answer = agent.run(Input(chat_message="What is the weather?"))
print(answer.chat_message)
