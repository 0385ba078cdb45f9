"""HTTP itself; nothing here depends on models.

api_table.py                                         Api, the interface of an API's folder
connection.py, hosts.py, keys.py, middleware.py      bounds and checks before every route
request_model.py, body.py, validation.py             strict request bodies
errors.py, refuse.py                                 the answers to refused requests
sse.py                                               JSON answers and server-sent events
"""
