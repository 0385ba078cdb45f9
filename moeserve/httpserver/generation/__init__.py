"""The parts that the APIs share, from a request body to the engine and back. Requests pass these modules in order:

request/          what a client asks for: parts of bodies, and `Asked`, to which each body is mapped
chat/             a conversation's prompt, and the form of its answer
resolve/          `Resolved`, the request with the served model's values filled in, and the messages to the engine
prepare.py        makes these messages from `Asked`
engine/           sends the messages to the router, and delivers the answers
usage.py, logprobs.py, chat/answers.py   read the answers
service.py        the objects that every route uses
"""
