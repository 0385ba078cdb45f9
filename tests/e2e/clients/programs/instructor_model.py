"""instructor: an answer that is a tool's arguments, asked for again until it is valid."""

import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, field_validator


class weather(BaseModel):
    """The weather of a city."""

    city: str

    @field_validator("city")
    @classmethod
    def _is_another(cls, city: str) -> str:
        if city == "Paris":
            raise ValueError("Rain.")
        return city


client = instructor.from_openai(OpenAI(base_url=sys.argv[1] + "/v1", api_key="none", max_retries=0))
asked = [{"role": "user", "content": "Where does it not rain?"}]
found = client.chat.completions.create(
    model=sys.argv[2], messages=asked, response_model=weather, max_retries=3
)
print(found.city)
