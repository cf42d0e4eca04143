"""The heads of requests and answers on their way through the relay: written anew, by what belongs to each connection.

What says how a message goes over one connection stays there; what only we read, the guest does not see, nor any API key, wherever it stands;
what tells the guest about the client comes from us alone.
"""

from dataclasses import dataclass

import h11

from hatchway.domain.key_forms import is_key
from hatchway.e2b.errors import E2bError
from hatchway.wire.relayed_heads import ABOUT_THE_CLIENT, HOP_BY_HOP, Fields, nominated, of_the_client, without_domain

_OURS = frozenset({b"e2b-sandbox-id", b"e2b-sandbox-port", b"e2b-traffic-access-token"})
_HOP_BY_HOP = HOP_BY_HOP | {b"trailer", b"expect"}
_NOT_TAKEN = _HOP_BY_HOP | ABOUT_THE_CLIENT | _OURS
"""Not taken from a client, however it writes them: servers take `_` for `-`."""
_WITHOUT_BODY = frozenset({101, 204, 304})


@dataclass(frozen=True, slots=True)
class Forwarding:
    """What the guest is told about the client."""

    peer: str
    secure: bool
    host: str
    """As the client wrote it."""
    masked: str | None = None
    """What the guest sees as `Host` instead."""

    def request(self, method: str, target: bytes, raw: Fields, *, upgrade: bytes = b"") -> h11.Request:
        """The request to the guest; `upgrade` is what the connection shall become: such a request has no body.

        Raises `E2bError` 400 for what HTTP does not admit, though our server took it.
        """
        lower = [(name.lower(), value) for name, value in raw]
        about_connection = nominated(lower)
        kept = [(b"Host", (self.masked if self.masked is not None else self.host).encode("latin-1"))]
        kept += [
            (name, value)
            for name, value in lower
            if name != b"host"
            and name not in about_connection
            and name.replace(b"_", b"-") not in _NOT_TAKEN
            and not is_key(value)  # SDKs send theirs with whatever goes to the same URL
        ]
        chunked = any(name == b"transfer-encoding" for name, _ in lower)
        if upgrade and (chunked or any(name == b"content-length" and value.strip(b"0 ") for name, value in lower)):
            raise E2bError(400, "A request for another protocol has no body.")
        if chunked:
            kept = [(name, value) for name, value in kept if name != b"content-length"]
            kept.append((b"Transfer-Encoding", b"chunked"))
        if upgrade:
            kept += [(b"Connection", b"Upgrade"), (b"Upgrade", upgrade)]
        else:
            kept.append((b"Connection", b"close"))  # this connection is for this request
        kept += of_the_client(self.peer, self.host.encode("latin-1"), secure=self.secure)
        try:
            return h11.Request(method=method.encode("ascii"), target=target, headers=kept)
        except (h11.LocalProtocolError, UnicodeEncodeError) as error:
            raise E2bError(400, f"The request cannot be passed on: {error}") from None


def answer_fields(raw: Fields, status: int) -> list[tuple[bytes, bytes]]:
    """The fields of an answer to the client; names in lower case.

    A length stays where it is that of the body that comes: not beside `Transfer-Encoding`, which says otherwise (RFC 9112, 6.3), and not
    with a status that has no body, whatever the guest says of what it would have been.
    """
    lower = [(name.lower(), value) for name, value in raw]
    about_connection = nominated(lower)
    measured = status not in _WITHOUT_BODY and all(name != b"transfer-encoding" for name, _ in lower)
    kept = []
    for name, value in lower:
        if name in _HOP_BY_HOP or name in about_connection or (name == b"content-length" and not measured):
            continue
        if name == b"set-cookie":
            value = without_domain(value)
        kept.append((name, value))
    return kept
