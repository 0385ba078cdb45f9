"""DSPy's ReAct: tools that are called in the text's own sections, and an answer drawn from what they said."""

import sys

import dspy


def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Paris"
    return "Rain."


model = dspy.LM(
    f"openai/{sys.argv[2]}", api_base=sys.argv[1] + "/v1", api_key="none", cache=False, num_retries=0
)
dspy.configure(lm=model)
print(dspy.ReAct("question -> answer", tools=[weather])(question="What is the weather?").answer)
