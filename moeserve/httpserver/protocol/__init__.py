"""Requests as pydantic models, with their ranges; responses as typed dicts, which orjson writes."""
