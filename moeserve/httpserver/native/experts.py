"""/v1/experts: expert usage counts, the memory that has each expert, and the counts as a file for --expert-heat."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter, Request, Response

from moeserve.httpserver.generation.service import Service, service_of
from moeserve.httpserver.native.objects import ExpertCacheTotals, ExpertDiskTotals, Experts, ExpertsHeat
from moeserve.httpserver.transport.documented_route import DocumentedRoute
from moeserve.httpserver.transport.sse import JsonResponse, answer
from moeserve.messages.steps import ExpertUse

router = APIRouter(tags=["Experts"], route_class=DocumentedRoute)


@router.get("/v1/experts", responses={200: {"model": Experts}})
async def experts(request: Request) -> Response:
    """Tokens routed to each expert of each layer since the start, the experts now in GPU memory and on disk (the others
    are in RAM), and the totals of the expert cache and of experts on disk."""
    return await answer(request, _experts(service_of(request)))


@router.get("/v1/experts/heat", responses={200: {"model": ExpertsHeat}})
async def heat(request: Request) -> Response:
    """The counts in the file format that --expert-heat reads."""
    from moeserve.placement.heat import (  # here: it imports all of placement
        ExpertHeat,
        write_heat,
    )

    service = service_of(request)
    use = await _use(service)
    file = ExpertHeat(service.model_name, use.layers, use.experts, use.experts_per_token, _counts(use))
    headers = {"content-disposition": 'attachment; filename="expert-heat.json"'}
    return Response(write_heat(file), media_type=JsonResponse.media_type, headers=headers)


async def _use(service: Service) -> ExpertUse:
    service.engine.state.require_ready()
    return await service.engine.expert_use.latest()


async def _experts(service: Service) -> Experts:
    use = await _use(service)
    shape = (use.layers, use.experts)
    on_gpu = np.frombuffer(use.on_gpu, np.uint8).reshape(shape)
    on_disk = (
        np.frombuffer(use.on_disk, np.uint8).reshape(shape) if use.on_disk else np.zeros(shape, np.uint8)
    )
    return {
        "object": "experts",
        "model": service.model_name,
        "layers": use.layers,
        "experts": use.experts,
        "experts_per_token": use.experts_per_token,
        "counts": _counts(use),
        "gpu_experts": [np.flatnonzero(layer).tolist() for layer in on_gpu],
        "disk_experts": [np.flatnonzero(layer).tolist() for layer in on_disk],
        "expert_gpus": (on_gpu.astype(int) - 1).tolist(),
        "expert_cache": _totals(use),
        "expert_disk": _disk_totals(use),
    }


def _totals(use: ExpertUse) -> ExpertCacheTotals | None:
    cache = use.cache
    if cache is None:
        return None
    return {"hits": cache.hits, "misses": cache.misses, "promotions": cache.promotions, "bytes": cache.bytes}


def _disk_totals(use: ExpertUse) -> ExpertDiskTotals | None:
    disk = use.disk
    return None if disk is None else {"hits": disk.hits, "misses": disk.misses, "bytes": disk.bytes}


def _counts(use: ExpertUse) -> list[list[int]]:
    counts: list[list[int]] = np.frombuffer(use.tokens, "<i8").reshape(use.layers, use.experts).tolist()
    return counts
