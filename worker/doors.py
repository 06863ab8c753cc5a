"""A gRPC server with everything that every one of ours has: limits, health and reflection."""

import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from transport.grpc_options import MAX_CONCURRENT_CALLS, server_options
from worker.errors import CannotStart

STOP_GRACE_S = 1.0


class GrpcDoor:
    """Add services to `server`, then start. `address` holds the port that was chosen."""

    def __init__(self, host: str, port: int, services: tuple[str, ...]) -> None:
        self._host = host
        self._port = port
        self._services = services
        self.address = ""
        self.server = grpc.aio.server(
            options=server_options(), maximum_concurrent_rpcs=MAX_CONCURRENT_CALLS
        )
        self._health = HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.server)
        names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self.server)

    async def start(self) -> None:
        """Listen and serve. Raises CannotStart, naming the port, when it is taken."""
        wanted = f"{self._host}:{self._port}"
        try:
            port = self.server.add_insecure_port(wanted)
        except RuntimeError as error:
            raise CannotStart(
                f"cannot listen on {wanted}: stop what listens there, or set another port"
            ) from error
        self.address = f"{self._host}:{port}"
        await self.server.start()
        for service in ("", "liveness", "readiness", *self._services):
            await self._health.set(service, health_pb2.HealthCheckResponse.SERVING)

    async def stop(self) -> None:
        await self._health.enter_graceful_shutdown()
        await self.server.stop(STOP_GRACE_S)
