"""Parses the text of an answer into reasoning, text and tool calls.

    events.py       what the parsers yield
    output.py       the parser of a whole answer
    reasoning.py    `<think>` ... `</think>` at the beginning of an answer
    reasoning_calls.py  calls that end the reasoning
    tool_calls.py   calls in the text, between tags; these modules read the inside of a call:
    hermes.py         {"name": ..., "arguments": {...}}, Qwen3's
    gemma.py          JSON without quotes around keys, and strings in tags
    minimax_m3.py     nested tags; a special token precedes each tag
    separated.py      name and JSON between tags: deepseek.py, kimi.py
    tagged.py         names and plain-text values in tags: qwen3_coder.py, glm.py, minimax.py, dsml.py
    tag_heads.py      the name and attributes in an opening tag
    value_end.py      the end of a value in tags
    either_body.py    a tagged call that may be JSON instead
    json_reader.py  JSON as models write it
    guided.py       the form of calls that a grammar enforces
    formats.py      the table of formats, and the format that a chat template asks for
    harmony.py      gpt-oss's answers as a whole: messages in channels
    kimi_k3.py      Kimi-K3's answers as a whole: sections, with section_tags.py and section_call.py

Texts are read character by character, so the result does not depend on how a text is cut into pieces, and the time is
linear in its length. Nothing here depends on HTTP or tokens.
"""
