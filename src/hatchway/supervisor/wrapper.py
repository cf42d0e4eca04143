"""The role that serves the API of E2B, and the socket over which it asks the control plane."""

import http.client
import socket
import ssl
from collections.abc import Callable
from urllib.parse import urlsplit

from hatchway.domain.errors import Unprocessable
from hatchway.supervisor import folder
from hatchway.supervisor.roles import Role
from hatchway.supervisor.secrets import Secrets
from hatchway.supervisor.settings import Settings
from hatchway.wire import behalf
from hatchway.wire.small_files import replace_file

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


DATA_CA = "e2b-data-ca.pem"
"""In the run folder: what the wrapper trusts data planes by."""


def publish_trusted(settings: Settings) -> None:
    """Puts the certificate of our data plane, and authorities of others', where the wrapper can read them; the files may be closed to its user.

    Raises `Unprocessable("ca_unusable")`.
    """
    files = [] if settings.data_tls is None else [settings.data_tls.certificate]
    files += [] if settings.e2b_data_ca is None else [settings.e2b_data_ca]
    texts = []
    for file in files:
        try:
            text = file.read_text(encoding="ascii")
            ssl.create_default_context(cadata=text)
        except (OSError, ValueError, ssl.SSLError) as error:
            raise Unprocessable(
                "ca_unusable", f"{file} holds no certificates: {error}", "`data_ca_file` in [e2b] names a file in PEM."
            ) from None
        texts.append(text)
    if texts:
        replace_file(settings.run / DATA_CA, "\n".join(texts).encode(), mode=0o644, durable=False)
    else:
        (settings.run / DATA_CA).unlink(missing_ok=True)


def control_socket(settings: Settings) -> socket.socket:
    """What the control plane listens on for the wrapper alone."""
    return folder.listen_unix(settings.run / behalf.SOCKET, socket.SOCK_STREAM, settings.identity.e2b)


def role(settings: Settings, listener: socket.socket, secrets: Callable[[], Secrets]) -> Role:
    """The role, on a listener that is bound, whose first connection starts it; `secrets` is asked at each start."""

    def body(ready: Callable[[], None]) -> None:
        from hatchway.e2b.main import E2bConfig, run

        now = secrets()
        config = E2bConfig(
            folder=settings.e2b_folder,
            control=settings.run / behalf.SOCKET,
            data_ca=settings.run / DATA_CA,
            secret=now.secret_of_e2b(settings),
            domain=settings.e2b_domain,
        )
        tls = None if now.e2b is None else now.e2b.context()
        run(config, listener=listener, ready=ready, alive=ready, tls=tls)

    return Role(
        "e2b",
        settings.identity.e2b,
        settings.log / "e2b.log",
        body=body,
        sockets=(listener,),
        on_demand=listener,
        descriptors=lambda: secrets().descriptors("e2b", "e2b_secret"),
        needs=(settings.e2b_folder, settings.run),
    )
