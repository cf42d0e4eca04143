"""What a client says first, looked at before anything is answered and put back; and how it hears that it is denied."""

import asyncio
import re

from hatchway.domain.policy.verdicts import Verdict
from hatchway.egress import tls
from hatchway.egress.client_hello import MAX_HELLO, ClientHello, HelloReader, Malformed, host_name
from hatchway.egress.streams import TcpStream

WITHIN_S = 5.0
"""For the first octets, and for the whole ClientHello."""
DENIED_WITHIN_S = 2.0
"""For the first octets of a connection that is denied anyway."""
MAX_METHOD = 20

_HOST = re.compile(rb"\r\nhost:[ \t]*([a-z0-9.-]{1,254})(?::[0-9]{1,5})?[ \t]*\r\n", re.IGNORECASE)
_UPPER = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")


class Denied(Exception):
    """The connection is not let through. `alert`: the TLS alert that tells its client; None: RST does."""

    def __init__(self, reason: str, explanation: str, verdict: Verdict | None = None, alert: int | None = None) -> None:
        super().__init__(f"{reason}: {explanation}")
        self.reason = reason
        self.explanation = explanation
        self.verdict = verdict
        self.alert = alert


def end_denied(client: TcpStream, denied: Denied) -> None:
    """An alert for who speaks TLS, RST for everybody else."""
    if denied.alert is None or client.lost:
        client.abort()
    else:
        client.write(tls.alert(denied.alert))
        client.close()


async def hello(client: TcpStream, within: float | None = None) -> ClientHello | None:
    """Returns the ClientHello; None where the client speaks no TLS but may speak HTTP, or ended without a word. Raises `Denied`."""
    within = WITHIN_S if within is None else within
    reader, read = HelloReader(), bytearray()
    try:
        async with asyncio.timeout(within):
            while True:
                came = await client.read()
                read += came
                if read and read[0] in _UPPER:
                    if _begins_with_method(bytes(read[: MAX_METHOD + 1])) or not came:
                        return None
                    continue
                found = _fed(reader, came)
                if found is not None:
                    return found
                if not came:
                    if not read:
                        return None
                    raise Denied("hello_malformed", "the connection ended in the middle of the ClientHello")
    except TimeoutError:
        raise Denied("peek_timeout", f"the client did not speak first within {within:.0f} s") from None
    finally:
        client.unread(bytes(read))


async def host_in_clear(client: TcpStream) -> str | None:
    """The name in the first `Host` of a request in clear. HTTP reads it strictly afterwards, and refuses what names another. Raises `TimeoutError`."""
    read = bytearray()
    try:
        async with asyncio.timeout(WITHIN_S):
            while b"\r\n\r\n" not in read and len(read) < MAX_HELLO:
                came = await client.read()
                if not came:
                    break
                read += came
    finally:
        client.unread(bytes(read))
    found = _HOST.search(read)
    if found is None:
        return None
    try:
        return host_name(found[1])
    except Malformed:
        return None


def _fed(reader: HelloReader, came: bytes) -> ClientHello | None:
    try:
        return reader.feed(came)
    except Malformed as error:
        if error.reason == "not_tls":
            raise Denied("protocol_mismatch", error.explanation) from error
        raise Denied(error.reason, error.explanation, alert=tls.DECODE_ERROR) from error


def _begins_with_method(data: bytes) -> bool:
    """Whether a method of HTTP is here; False: it may become one. Raises `Denied` for what is another protocol's beginning."""
    method, space, _ = data.partition(b" ")
    if not _UPPER.issuperset(method) or (not space and len(method) > MAX_METHOD):
        raise Denied("protocol_mismatch", "this is neither TLS nor HTTP")
    return bool(space)
