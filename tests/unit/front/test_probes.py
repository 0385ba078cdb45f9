"""What the probes of a server with several models say."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.testclient import TestClient

from moeserve.front import probes
from moeserve.front.schedule import State
from tests.support.front.scripted_models import Script, ScriptedInstance, pool_of
from tests.support.router.virtual_time import Clock


def test_a_server_that_waits_for_the_one_before_says_so() -> None:
    """It takes requests, which wait; a load balancer that has another server sends them there."""
    pool, _ = pool_of(Clock(), 1, a=Script())
    app = FastAPI()
    app.state.pool = pool
    app.include_router(probes.router)
    client = TestClient(app)

    def said(path: str) -> tuple[int, str]:
        answer = client.get(path)
        return answer.status_code, answer.json()["status"]

    pool.may_load.clear()
    assert said("/health") == (200, "waiting")
    assert said("/health/live") == (200, "waiting")
    assert said("/health/ready") == (503, "waiting")
    pool.may_load.set()
    assert said("/health") == said("/health/ready") == (200, "ok")
    pool.is_draining = True
    assert said("/health") == said("/health/ready") == (503, "draining")


def test_a_model_whose_server_does_not_answer_is_named() -> None:
    """The others are served, and its own requests wait: the whole server stays well."""
    pool, world = pool_of(Clock(), 2, a=Script(), b=Script())
    for model in pool.models:
        model.state = State.LOADED
        model.instance = ScriptedInstance(model, world.scripts[model.name], world)
    assert probes.health_of(pool) == {"status": "ok", "models": {"a": "loaded", "b": "loaded"}}
    assert pool.models[0].instance is not None
    pool.models[0].instance.is_answering = False
    assert probes.health_of(pool) == {"status": "ok", "models": {"a": "not_answering", "b": "loaded"}}
