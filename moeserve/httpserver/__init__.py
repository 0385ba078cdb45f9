"""The process that clients talk to: HTTP, validation, chat templates, tokenisation, metrics.

    server.py, app.py    the process, and the application with its table of APIs
    openai/ responses/ anthropic/ lightllm/ llama_server/ ollama/ native/
                         one folder per API: routes, bodies, answers, error shape; `__init__.py` exports its `Api`
    web/                 the web pages
    generation/          what the APIs share: requests on their way to the engine, and answers on their way back
    observability/       metrics, the access log, spans
    transport/           HTTP itself: middleware, errors, bodies, server-sent events, connections

Imports run downwards in this list, and no API imports another (tests/unit/test_imports.py). A new API is a folder and a
line of `app.APIS`.
"""
