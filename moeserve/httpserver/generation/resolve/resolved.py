"""Resolved: a request after everything that depends on the served model has been filled in."""

from __future__ import annotations

from dataclasses import dataclass, field

from moeserve.httpserver.generation.chat.answer_form import PLAIN_TEXT, AnswerForm
from moeserve.httpserver.generation.chat.picture_tokens import NO_CHAT, ChatTokens
from moeserve.httpserver.generation.request.asked import Asked
from moeserve.messages.reasoning import EarlyEnd
from moeserve.messages.sampling import SamplingParams, TextOptions
from moeserve.sampling.order import heeded
from moeserve.sampling.parameters import DEFAULTS, SamplerSettings


@dataclass(frozen=True, slots=True)
class Resolved:
    """All parts of the messages to the engine, except ids and seeds."""

    asked: Asked
    prompts: tuple[list[int], ...] = ()  # token ids
    sampler: SamplerSettings = DEFAULTS
    default_max_tokens: int | None = None  # an upper bound only; None: the rest of the context
    logit_bias: dict[int, float] = field(default_factory=dict)
    bad_sequences: tuple[tuple[int, ...], ...] = ()
    dry_breakers: bytes = b""
    form: AnswerForm = PLAIN_TEXT
    grammar: str = ""  # the compiled form of the answer form's grammar
    adapter: str = ""  # GenerateRequest.adapter
    chat: ChatTokens = NO_CHAT  # the tokens of a conversation, which is then the only prompt
    # Tokens that end a fill-in-the-middle answer, in addition to the model's end tokens.
    fim_ends: tuple[int, ...] = ()

    def sampling(
        self, *, max_tokens: int, seed: int, stop_token_ids: tuple[int, ...], scores_prompt: bool
    ) -> SamplingParams:
        """Returns the parameters of one choice. scores_prompt: True for the one choice of a prompt that computes the
        prompt's log-probabilities for all its choices (`prompt_scores.py`)."""
        asked = self.asked
        return SamplingParams(
            max_tokens=max_tokens,
            min_tokens=asked.min_tokens,
            **heeded(self.sampler, asked.samplers),
            samplers=asked.samplers,
            dry_breakers=self.dry_breakers,
            logit_bias=self.logit_bias,
            seed=seed,
            logprobs=asked.logprobs,
            prompt_logprobs=asked.prompt_logprobs if scores_prompt else None,
            stop_token_ids=stop_token_ids,
            bad_sequences=self.bad_sequences,
            grammar=self.grammar,
            thinking=self.form.thinking,
        )

    def early_end(self, eos_ids: tuple[int, ...]) -> EarlyEnd | None:
        """Returns the model's end tokens that must not end the answer while the model reasons; where the model chooses
        one of them then, the tokens that end the reasoning take its place. None if there are no such tokens, or if the
        model may end within its reasoning. eos_ids: the model's end tokens. Not among the returned ones are tokens by
        which the client, or its wish for a single call, ends the answer: these end it within the reasoning, too."""
        form, own = self.form, {*self.asked.stop_token_ids, *self.form.stop_token_ids}
        if not form.must_answer or form.reasoning is None or self.asked.ignore_eos:
            return None
        ends = frozenset(eos_ids) - own
        return EarlyEnd(form.reasoning, ends) if ends and own.isdisjoint(form.reasoning.ending) else None

    def text_options(self) -> TextOptions:
        asked = self.asked
        return TextOptions(
            stop=asked.stop,
            include_stop=asked.include_stop,
            skip_special_tokens=asked.skip_special_tokens,
            shown_tokens=self.form.shown_tokens,
            min_tokens=asked.min_tokens,
            reasoning=self.form.reasoning if asked.stop else None,
        )
