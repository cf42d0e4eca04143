"""The role that serves the API of E2B, and the socket over which it asks the control plane."""

import http.client
import socket
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from hatchway.supervisor import folder
from hatchway.supervisor.configuration import read_secret
from hatchway.supervisor.roles import Role
from hatchway.supervisor.settings import Settings
from hatchway.wire import behalf

HEALTHY = 204
PROBE_WITHIN_S = 5.0


def probe(url: str) -> int:
    """The status that `/health` answers; whoever's the certificate is. Raises `OSError`, `ValueError`, `http.client.HTTPException`."""
    parts = urlsplit(url)
    if parts.scheme == "https":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection: http.client.HTTPConnection = http.client.HTTPSConnection(
            parts.netloc, timeout=PROBE_WITHIN_S, context=context
        )
    else:
        connection = http.client.HTTPConnection(parts.netloc, timeout=PROBE_WITHIN_S)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status
    finally:
        connection.close()


def control_socket(settings: Settings) -> socket.socket:
    """What the control plane listens on for the wrapper alone."""
    return folder.listen_unix(settings.run / behalf.SOCKET, socket.SOCK_STREAM, settings.identity.e2b)


def role(settings: Settings, listener: socket.socket, tls: Callable[[], ssl.SSLContext | None]) -> Role:
    """The role, on a listener that is bound, whose first connection starts it; `tls` is asked at each start. Raises what `read_secret` does."""
    secret = None if settings.e2b_secret is None else read_secret(settings.e2b_secret)

    def body(ready: Callable[[], None]) -> None:
        from hatchway.e2b.main import E2bConfig, run

        config = E2bConfig(
            folder=settings.e2b_folder,
            control=settings.run / behalf.SOCKET,
            secret=secret,
            domain=settings.e2b_domain,
        )
        run(config, listener=listener, ready=ready, alive=ready, tls=tls())

    return Role(
        "e2b",
        settings.identity.e2b,
        settings.log / "e2b.log",
        body=body,
        sockets=(listener,),
        on_demand=listener,
        needs=(settings.e2b_folder, settings.run),
    )
