"""What the APIs share, from a request body to the engine and back.

fields.py, grammar_fields.py, chat_messages.py, chat_tools.py    parts of request bodies
spec.py              GenerationSpec, which a body fills
prepare.py           resolves a spec against the model (conversation.py, structured_output.py) ...
request_builder.py   ... and freezes it into GenerateRequests
engine_client.py     sends them to the router and receives their text
answers.py, usage.py, logprobs.py    read the answers
service.py           what every route works with
"""
