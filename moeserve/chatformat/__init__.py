"""The text of an answer taken apart: what the model thought, what it says, which tools it calls.

    events.py       what comes out
    reasoning.py    `<think>` ... `</think>` at the beginning
    tool_calls.py   calls among the text; what stands in a call is read by
    hermes.py         {"name": ..., "arguments": {...}}, Qwen3's
    qwen3_coder.py    <function=...><parameter=...>...
    output.py       the parts put together
    detect.py       which of them a chat template asks for

Everything is read character by character, so the outcome is the same however the text is cut into pieces; and in
time that is linear in it. Nothing here knows HTTP or tokens.
"""
