"""What the control plane is measured against: the same framework, the same transactions of a create, and nothing else.

Run as a process: `python -m tests.support.bare_endpoint DATABASE FD`.
"""

import asyncio
import socket
import sys
import time

import msgspec
import uvicorn
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router

from hatchway.domain.lifecycle import State
from hatchway.domain.shapes import Shape
from hatchway.storage import accepting, ending, keys
from hatchway.storage.database import Database
from hatchway.wire.node import Observed

NEW = accepting.NewSandbox(
    project="default",
    name=None,
    node_id="n",
    template="seed:latest",
    template_digest="sha256:0",
    shape=Shape(),
    metadata={},
    env={},
    require_isolation=None,
)


async def main(where: str, fd: int) -> None:
    """Serves POST / until it is killed."""
    database = await Database.open(where)
    await database.write(keys.ensure_project, "default")

    async def create(request: Request) -> Response:
        msgspec.json.decode(await request.body())
        accepted = await database.write(accepting.accept_create, NEW, None)
        seen = Observed(
            sandbox_id=accepted.sandbox.id,
            project="default",
            generation=1,
            state=State.RUNNING,
            boot_id="b",
            sequence=1,
        )
        finished = await database.write(ending.succeed, accepted.operation, seen, time.time())
        assert finished is not None
        answer = {"sandbox": finished.sandbox, "operation": finished.operation}
        return Response(msgspec.json.encode(answer), media_type="application/json")

    app = Router([Route("/", create, methods=["POST"])])
    server = uvicorn.Server(
        uvicorn.Config(app, loop="asyncio", http="httptools", lifespan="off", access_log=False, log_config=None)
    )
    serving = asyncio.create_task(server.serve([socket.socket(fileno=fd)]))
    while not server.started:
        await asyncio.sleep(0.01)
    print("ready", flush=True)
    await serving


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
