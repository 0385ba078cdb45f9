"""Parses the text of an answer into reasoning, text and tool calls.

    events.py       what the parsers yield
    output.py       the parser of a whole answer
    reasoning.py    `<think>` ... `</think>` at the beginning
    reasoning_calls.py  calls that end the reasoning
    tool_calls.py   calls in the text, between tags; the inside of a call is read by
    hermes.py         {"name": ..., "arguments": {...}}, Qwen3's
    gemma.py          nearly JSON
    minimax_m3.py     tags in tags, each behind a token of its own
    separated.py      name and JSON between tags: deepseek.py, kimi.py
    tagged.py         names and plain-text values in tags: qwen3_coder.py, glm.py, minimax.py, dsml.py
    tag_heads.py      what a tag says of its call or value
    value_end.py      where such a value ends
    either_body.py    tagged, or JSON instead
    json_reader.py  JSON as models write it
    guided.py       the form of calls that a grammar enforces
    formats.py      the table of formats, and which of them a chat template asks for
    harmony.py      gpt-oss's answers as a whole: messages in channels

Texts are read character by character, so the result does not depend on how a text is cut into pieces, and the time is
linear in its length. Nothing here depends on HTTP or tokens.
"""
