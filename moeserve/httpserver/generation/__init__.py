"""What the APIs share, from a request body to the engine and back. It goes one way:

request/          what a client asks for: parts of bodies, and `Asked`, which a body is mapped to
chat/             a conversation's prompt, and the form of its answer
resolve/          `Resolved`, the request as the served model gets it, and the messages to the engine
prepare.py        takes a request from `Asked` to those messages
engine/           sends the messages to the router, and delivers what comes back
usage.py, logprobs.py, chat/answers.py    read the answers
service.py        what every route works with"""
