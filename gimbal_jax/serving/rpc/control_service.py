"""The gRPC service gimbal.v1.Control: placement, traffic, traces, decisions and status of a server."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import asdict

import grpc

from gimbal_jax.protos import control_pb2 as pb
from gimbal_jax.protos import control_pb2_grpc as pb_grpc
from gimbal_jax.serving.core.core import EngineCore
from gimbal_jax.serving.core.status import Status
from gimbal_jax.serving.frontend.frontend import Frontend

SERVICE = pb.DESCRIPTOR.services_by_name["Control"].full_name

type Context = grpc.aio.ServicerContext


class ControlService(pb_grpc.ControlServicer):
    """Answers from the core's status and the dispatcher's records. Only ``Rebalance`` changes anything."""

    def __init__(self, core: EngineCore, frontend: Frontend) -> None:
        self._core = core
        self._frontend = frontend

    async def _status(self) -> Status:
        # In a thread, because it copies arrays and may wait for the engine thread.
        return await asyncio.to_thread(self._core.status)

    async def GetPlacement(self, request: pb.GetPlacementRequest, context: Context) -> pb.GetPlacementResponse:
        slot_of_expert_LE = (await self._status()).placement.slot_of_expert_LE
        layers, experts = slot_of_expert_LE.shape
        mesh = self._core.config.mesh
        return pb.GetPlacementResponse(
            layers=layers,
            experts=experts,
            ranks=mesh.ranks,
            sources=mesh.dp,
            slot_of_expert_LE=slot_of_expert_LE.ravel().tolist(),
        )

    async def GetCounts(self, request: pb.GetCountsRequest, context: Context) -> pb.GetCountsResponse:
        placement = (await self._status()).placement
        total = request.scope == pb.GetCountsRequest.TOTAL
        counts_LSE = placement.total_counts_LSE if total else placement.window_counts_LSE
        layers, sources, experts = counts_LSE.shape
        return pb.GetCountsResponse(
            layers=layers, sources=sources, experts=experts, counts_LSE=counts_LSE.ravel().tolist()
        )

    async def GetTraces(self, request: pb.GetTracesRequest, context: Context) -> pb.GetTracesResponse:
        traces = [pb.Trace(**asdict(trace)) for trace in self._core.traces]
        return pb.GetTracesResponse(now=self._frontend.clock(), traces=traces, central_queue=self._core.central_queue)

    async def GetDecisions(self, request: pb.GetDecisionsRequest, context: Context) -> pb.GetDecisionsResponse:
        recent = self._frontend.dispatcher.recent
        skipped = max(0, len(recent) - request.last) if request.last else 0
        dispatches = [
            pb.Dispatch(
                request_id=record.request_id,
                time=record.time,
                engine=record.decision.engine,
                rule=record.decision.rule,
                terms=[pb.Term(name=name, values_S=values_S) for name, values_S in record.decision.terms.items()],
            )
            for record in itertools.islice(recent, skipped, None)
        ]
        placements = [pb.Placement(**asdict(record)) for record in (await self._status()).placement.records]
        return pb.GetDecisionsResponse(now=self._frontend.clock(), dispatches=dispatches, placements=placements)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        status = await self._status()
        return pb.GetStatusResponse(
            now=self._frontend.clock(),
            state=status.state,
            error=status.error,
            active_requests=self._frontend.active,
            central_queue=self._core.central_queue,
            engines=[pb.EngineStatus(**asdict(engine)) for engine in status.engines],
            steps=pb.StepStatus(**asdict(status.steps)),
            placement=pb.PlacementTotals(**asdict(status.placement.totals)),
        )

    async def Rebalance(self, request: pb.RebalanceRequest, context: Context) -> pb.RebalanceResponse:
        self._core.rebalance()
        return pb.RebalanceResponse()
