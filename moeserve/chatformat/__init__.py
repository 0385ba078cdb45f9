"""The text of an answer taken apart: the model's reasoning, its text, and its tool calls.

    events.py       what comes out
    output.py       the parts put together
    reasoning.py    `<think>` ... `</think>` at the beginning
    reasoning_calls.py  calls that end the reasoning
    tool_calls.py   calls among the text, between tags; what stands in a call is read by
    hermes.py         {"name": ..., "arguments": {...}}, Qwen3's
    gemma.py          nearly JSON
    minimax_m3.py     tags in tags, each behind a token of its own
    separated.py      name and JSON between tags: deepseek.py, kimi.py
    tagged.py         names and plain-text values in tags: qwen3_coder.py, glm.py, minimax.py
    value_end.py      where such a value ends
    either_body.py    those, or JSON in their place
    json_reader.py  JSON as models write it
    guided.py       the form of calls that a grammar enforces
    formats.py      the table of formats, and which of them a chat template asks for
    harmony.py      gpt-oss's answers as a whole: messages in channels

Everything is read character by character, so the outcome is the same however the text is cut into pieces; and in
time that is linear in it. Nothing here knows HTTP or tokens.
"""
