"""PreparedRequest: a resolved request. With it a route runs the request's generations and reads their answers."""

from __future__ import annotations

from dataclasses import dataclass

from moeserve.httpserver.generation.chat.answers import AnswerReader
from moeserve.httpserver.generation.chat.model_text import ModelText
from moeserve.httpserver.generation.engine.engine_client import EngineClient
from moeserve.httpserver.generation.engine.generation_stream import GenerationStream
from moeserve.httpserver.generation.resolve.resolved import Resolved
from moeserve.httpserver.generation.usage import UsageTally
from moeserve.messages.schema import GenerateRequest, TextItem


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One HTTP request, ready for the engine. Choices are ordered by prompt, then by number."""

    engine: EngineClient
    text: ModelText
    resolved: Resolved
    requests: list[GenerateRequest]  # one a choice
    readers: list[AnswerReader]  # one for each choice of a conversation; empty for plain prompts
    tally: UsageTally

    def stream(self) -> GenerationStream:
        """Returns the context manager of the request's generations: entering it (`async with`) submits them,
        leaving it aborts those that have not ended."""
        return GenerationStream(
            self.engine,
            self.requests,
            self.resolved.asked.caller,
            "chat" if self.readers else "text_completion",
        )

    async def complete(self) -> list[list[TextItem]]:
        """Returns all items of each request. Raises ApiError if a request ends with an error."""
        answers: list[list[TextItem]] = [[] for _ in self.requests]
        async with self.stream() as stream:
            async for index, item in stream:
                answers[index].append(item)
        return answers

    def stop_reason(self, end: TextItem) -> str | int | None:
        """Returns the client's stop string or token that ended the choice. Returns None if the choice ended at the
        server's own stop token, which follows a single call."""
        is_tag = end.stop_reason is not None and end.stop_reason == self.text.formats.call_end
        is_own = end.stop_reason in self.resolved.asked.stop_token_ids
        return None if is_tag and not is_own else end.stop_reason
