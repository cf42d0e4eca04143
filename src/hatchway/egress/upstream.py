"""The way out: a name is resolved here, every address is judged here, and nothing else is dialled: never an address that a sandbox chose for a name.

`Dialler.dial` goes through all of it for one connection; `Dialler.leg` asks the broker to do it for a request with a credential. What may be
reached beyond public addresses is said by a rule (private networks) and by the operator (`HostService`); both are needed for this host's own.
"""

import asyncio
import base64
import hashlib
import ipaddress
import socket
import ssl
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from hatchway.domain.policy.addresses import Address, Network
from hatchway.domain.policy.terms import Terms
from hatchway.domain.policy.verdicts import Action, Verdict
from hatchway.egress.http.seam import FlowError, StreamLost
from hatchway.egress.resolver import NameServer, Resolved, Resolver
from hatchway.egress.streams import TcpStream
from hatchway.egress.tls import TlsStream, aside, handshake
from hatchway.wire.broker import MAX_LEG_HEAD, Leg, LegAnswer
from hatchway.wire.paths import address as reachable_path

CONNECT_WITHIN_S = 10.0
TRY_WITHIN_S = 4.0
MAX_TRIES = 4
LEG_WITHIN_S = 25.0
OWN_ADDRESSES_FOR_S = 5.0
MAX_CONTEXTS = 128
ContextKey = tuple[object, ...]
"""What contexts of TLS differ in: whom they trust, and what they speak."""

_LENGTH = struct.Struct(">I")


@dataclass(frozen=True)
class HostService:
    """Something that policies may name although its address is this host's, loopback or link-local: the operator says so, for one port."""

    network: Network
    port: int


@dataclass(frozen=True)
class UpstreamProxy:
    """A proxy that rules may route through: `http://host:port` (CONNECT) or `socks5://host:port`. It resolves names unless `by_address`."""

    url: str
    by_address: bool = False
    """Addresses are resolved and judged here, and the proxy is asked for an address."""


@dataclass(frozen=True)
class OutConfig:
    """What the operator says about the way out, for all sandboxes of this process."""

    servers: tuple[NameServer, ...] = ()
    extra_ca: tuple[Path, ...] = ()
    """PEM of authorities that are trusted beside the system's."""
    host_services: tuple[HostService, ...] = ()
    proxies: dict[str, UpstreamProxy] = field(default_factory=dict)
    """By what a rule's `route.via` says: `http:name` or `socks5:name`."""
    broker: Path | None = None
    """The broker's socket for legs."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where one connection goes, and on which terms. The one thing that dialling, TLS, and the record go by."""

    host: str
    """The canonical name, or a literal address where a rule for addresses allowed it."""
    port: int
    tls: bool
    terms: Terms
    judge: Callable[[Address, frozenset[Address]], Verdict]
    """`Policy.address` for the verdict that let the connection pass; gets this host's own addresses."""
    records: tuple[Address, ...] = ()
    """Addresses that the policy says the name has, instead of asking."""


@dataclass
class Dialled:
    """An upstream connection and what was found on the way."""

    stream: TcpStream | TlsStream
    alpn: str = ""
    address: str = ""
    chain: tuple[str, ...] = ()
    certificate_sha256: str = ""


class Dialler:
    """The way out of one process. Its TLS contexts are shared: one holds the system's authorities, which are large."""

    def __init__(self, config: OutConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self.config = config
        self._clock = clock
        self._contexts: dict[ContextKey, ssl.SSLContext] = {}
        self._making: dict[ContextKey, asyncio.Task[ssl.SSLContext]] = {}
        self._own: tuple[float, frozenset[Address]] = (-1e9, frozenset())

    def resolver(self, servers: Sequence[NameServer] = ()) -> Resolver:
        """Returns a sandbox's resolver: of the servers that its policy names, or the configured ones."""
        return Resolver(servers or self.config.servers, self._clock)

    async def dial(
        self,
        target: Target,
        resolver: Resolver,
        *,
        alpn: tuple[str, ...] = (),
        counted: Callable[[int, int], None] | None = None,
        made: Callable[[TcpStream], None] | None = None,
        turn: asyncio.Lock | None = None,
    ) -> Dialled:
        """Connects, and speaks TLS where the target says so. `counted`: see `TcpStream`; `made` gets the stream before TLS begins, and may raise;
        `turn`: see `tls.handshake`.

        Raises `FlowError`: `resolve_failed address_denied connect_failed proxy_failed tls_failed`.
        """
        proxy = self.proxy(target.terms)
        if proxy is not None and self.resolves(proxy, target):
            stream = await self._through(proxy, target.host, target.port, counted)
            dialled = Dialled(stream)
        else:
            found = await self.vetted(target, resolver)
            dialled = await self._first(target, found, proxy, counted)
        under = dialled.stream
        assert isinstance(under, TcpStream)
        try:
            if made is not None:
                made(under)
            if target.tls:
                await self._secure(dialled, under, target, alpn, turn)
        except BaseException:
            under.abort()
            raise
        return dialled

    async def vetted(self, target: Target, resolver: Resolver) -> Resolved:
        """Returns the addresses of a target that may be dialled. Raises `FlowError("resolve_failed")`, `FlowError("address_denied")`."""
        if target.terms.pin:
            found = Resolved(target.terms.pin)
        elif target.records:
            found = Resolved(target.records)
        elif (literal := _literal(target.host)) is not None:
            found = Resolved((literal,))
        else:
            found = await resolver.resolve(target.host)
        good: list[Address] = []
        denied: Verdict | None = None
        for address in found.addresses:
            verdict = self.refused(target, address)
            if verdict is None:
                good.append(address)
            else:
                denied = verdict
        if denied is not None and not good:
            chain = f" (by way of {', '.join(found.chain)})" if found.chain else ""
            raise FlowError("address_denied", f"{target.host}{chain}: {denied.explanation}", 403)
        return Resolved(tuple(good), found.chain)

    def refused(self, target: Target, address: Address) -> Verdict | None:
        """Why an address may not be dialled for a target; None where it may."""
        verdict = target.judge(address, self._own_addresses())
        if verdict.action is Action.ALLOW or self._is_offered(address, target, verdict):
            return None
        return verdict

    def _is_offered(self, address: Address, target: Target, verdict: Verdict) -> bool:
        """Whether the operator offers what no policy can allow, and the rule takes it."""
        return (
            verdict.reason in ("platform_denied", "private_denied")
            and any(target.port == one.port and _within(address, one.network) for one in self.config.host_services)
            and any(_within(address, network) for network in target.terms.private)
        )

    def _own_addresses(self) -> frozenset[Address]:
        at, known = self._own
        if self._clock() - at > OWN_ADDRESSES_FOR_S:
            known = own_addresses()
            self._own = (self._clock(), known)
        return known

    def resolves(self, proxy: UpstreamProxy, target: Target) -> bool:
        """Whether a proxy is asked for the name itself. Where the policy says the address, that one is judged here and asked for."""
        said = target.terms.pin or target.terms.within or target.records or _literal(target.host) is not None
        return not (proxy.by_address or said)

    # -- TCP

    async def _first(
        self, target: Target, found: Resolved, proxy: UpstreamProxy | None, counted: Callable[[int, int], None] | None
    ) -> Dialled:
        """The first of the addresses that answers."""
        why = ""
        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                for address in found.addresses[:MAX_TRIES]:
                    try:
                        if proxy is not None:
                            stream = await self._through(proxy, str(address), target.port, counted)
                        else:
                            stream = await connect(address, target.port, counted)
                    except (OSError, TimeoutError) as error:
                        why = (error.strerror if isinstance(error, OSError) else None) or "no answer in time"
                        continue
                    return Dialled(stream, address=str(address), chain=found.chain)
        except TimeoutError:
            why = why or "no answer in time"
        raise FlowError("connect_failed", f"{target.host}:{target.port} cannot be reached: {why}")

    def proxy(self, terms: Terms) -> UpstreamProxy | None:
        """The upstream proxy that a rule routes through; None: direct. Raises `FlowError("proxy_failed")` for one that is not configured."""
        if terms.route.via == "direct":
            return None
        proxy = self.config.proxies.get(terms.route.via)
        if proxy is None:
            raise FlowError(
                "proxy_failed", f"the upstream proxy {terms.route.via!r} is not in the gateway's configuration"
            )
        return proxy

    async def _through(
        self, proxy: UpstreamProxy, host: str, port: int, counted: Callable[[int, int], None] | None
    ) -> TcpStream:
        import python_socks  # for those who have a proxy alone
        from python_socks.async_.asyncio import Proxy

        try:
            async with asyncio.timeout(CONNECT_WITHIN_S):
                sock = await Proxy.from_url(proxy.url, rdns=True).connect(host, port)
        except (OSError, TimeoutError, python_socks.ProxyError, python_socks.ProxyTimeoutError) as error:
            raise FlowError("proxy_failed", f"the upstream proxy did not connect to {host}:{port}: {error}") from error
        return await _stream(sock, counted)

    # -- TLS

    async def _secure(
        self, dialled: Dialled, under: TcpStream, target: Target, alpn: tuple[str, ...], turn: asyncio.Lock | None
    ) -> None:
        context = await self._context(target, alpn)
        try:
            stream = await handshake(under, context, server_side=False, server_hostname=target.host, turn=turn)
        except ssl.SSLCertVerificationError as error:
            raise FlowError(
                "tls_failed", f"the certificate of {target.host} is not valid: {error.verify_message}"
            ) from error
        except (ssl.SSLError, StreamLost, TimeoutError) as error:
            why = error.reason if isinstance(error, ssl.SSLError) else str(error) or "no answer in time"
            raise FlowError("tls_failed", f"TLS with {target.host} failed: {why}") from error
        certificate = stream.peer_certificate() or b""
        dialled.certificate_sha256 = hashlib.sha256(certificate).hexdigest()
        if target.terms.upstream_spki and not _pinned(certificate, target.terms.upstream_spki):
            raise FlowError("tls_failed", f"the key of {target.host} is none of those that the rule names")
        dialled.stream, dialled.alpn = stream, stream.alpn

    async def _context(self, target: Target, alpn: tuple[str, ...]) -> ssl.SSLContext:
        key = (target.terms.upstream_ca, target.terms.tls_min, alpn)
        context = self._contexts.get(key)
        if (
            context is None
        ):  # the system's authorities take some ten milliseconds: once, however many connections begin together
            making = self._making.get(key)
            if making is None:
                making = self._making[key] = asyncio.get_running_loop().create_task(
                    self._new_context(key, target, alpn)
                )
                making.add_done_callback(lambda done: done.cancelled() or done.exception())
            context = await asyncio.shield(making)
        return context

    async def _new_context(self, key: ContextKey, target: Target, alpn: tuple[str, ...]) -> ssl.SSLContext:
        try:
            context = await asyncio.get_running_loop().run_in_executor(aside(), self._make_context, target, alpn)
        finally:
            del self._making[key]
        while len(self._contexts) >= MAX_CONTEXTS:
            self._contexts.pop(next(iter(self._contexts)))
        self._contexts[key] = context
        return context

    def _make_context(self, target: Target, alpn: tuple[str, ...]) -> ssl.SSLContext:
        try:
            context = ssl.create_default_context(
                cadata="\n".join(target.terms.upstream_ca) if target.terms.upstream_ca else None
            )
            if not target.terms.upstream_ca:
                for file in self.config.extra_ca:
                    context.load_verify_locations(file)
        except (OSError, ssl.SSLError, ValueError) as error:
            raise FlowError("tls_failed", f"the authorities to trust cannot be read: {error}") from error
        context.minimum_version = ssl.TLSVersion.TLSv1_3 if target.terms.tls_min == "1.3" else ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_TICKET | ssl.OP_NO_COMPRESSION
        if alpn:
            context.set_alpn_protocols(list(alpn))
        return context

    # -- broker

    async def leg(
        self,
        leg: Leg,
        *,
        counted: Callable[[int, int], None] | None = None,
        made: Callable[[TcpStream], None] | None = None,
    ) -> tuple[TcpStream, LegAnswer]:
        """Opens a leg of the broker. Raises `FlowError` with what the broker said, or `cred_unavailable` where it is not there."""
        if self.config.broker is None:
            raise FlowError("cred_unavailable", "there is no broker on this host", 503)
        stream: TcpStream | None = None
        try:
            async with asyncio.timeout(LEG_WITHIN_S):
                with reachable_path(self.config.broker) as path:
                    _, stream = await asyncio.get_running_loop().create_unix_connection(
                        lambda: TcpStream(counted), path
                    )
                if made is not None:
                    made(stream)
                body = msgspec.msgpack.encode(leg)
                stream.write(_LENGTH.pack(len(body)) + body)
                answer = msgspec.msgpack.decode(await _framed(stream), type=LegAnswer)
        except (OSError, TimeoutError, msgspec.MsgspecError) as error:
            if stream is not None:
                stream.abort()
            raise FlowError(
                "cred_unavailable",
                f"The broker of credentials does not serve: {error or 'no answer in time'}.",
                503,
                "It is started again by itself; try again in a moment.",
            ) from error
        if answer.error:
            stream.abort()
            status = 503 if answer.error == "cred_unavailable" else 502
            raise FlowError(answer.error, answer.message, status, answer.remedy)
        return stream, answer


async def _framed(stream: TcpStream) -> bytes:
    data = b""
    need = _LENGTH.size
    while len(data) < need:
        came = await stream.read()
        if not came:
            raise StreamLost("the broker closed the leg")
        data += came
        if len(data) >= _LENGTH.size:
            need = _LENGTH.size + _LENGTH.unpack_from(data)[0]
            if need > MAX_LEG_HEAD:
                raise StreamLost("the broker's answer is too large")
    stream.unread(data[need:])
    return data[_LENGTH.size : need]


async def connect(address: Address, port: int, counted: Callable[[int, int], None] | None = None) -> TcpStream:
    """Connects to an address that was judged, and to nothing else. Raises OSError, `TimeoutError` after 4 s."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        async with asyncio.timeout(TRY_WITHIN_S):
            await asyncio.get_running_loop().sock_connect(sock, (str(address), port))
        if ipaddress.ip_address(sock.getpeername()[0]) != address:
            raise OSError(None, "the connection ended somewhere else")
        return await _stream(sock, counted)
    except BaseException:
        sock.close()
        raise


async def _stream(sock: socket.socket, counted: Callable[[int, int], None] | None) -> TcpStream:
    sock.setblocking(False)
    keep_alive(sock)
    _, stream = await asyncio.get_running_loop().create_connection(lambda: TcpStream(counted), sock=sock)
    return stream


def keep_alive(sock: socket.socket) -> None:
    """A peer that is gone without a word is noticed within some minutes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 60)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 20)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 4)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 120_000)


def own_addresses(proc: Path = Path("/proc/net")) -> frozenset[Address]:
    """The addresses of this host's interfaces, as the kernel has them now."""
    found: set[Address] = set()
    address = ""
    for line in (proc / "fib_trie").read_text(encoding="ascii").splitlines():
        words = line.split()
        if words[:1] == ["|--"]:
            address = words[1]
        elif words[-1:] == ["LOCAL"]:
            found.add(ipaddress.IPv4Address(address))
    if (proc / "if_inet6").exists():
        for line in (proc / "if_inet6").read_text(encoding="ascii").splitlines():
            found.add(ipaddress.IPv6Address(int(line.split()[0], 16)))
    return frozenset(found)


def _within(address: Address, network: Network) -> bool:
    return address.version == network.version and address in network


def _literal(host: str) -> Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _pinned(certificate: bytes, pins: tuple[str, ...]) -> bool:
    key = x509.load_der_x509_certificate(certificate).public_key()
    public = key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)
    digest = hashlib.sha256(public)
    return bool({digest.hexdigest(), base64.b64encode(digest.digest()).decode()} & set(pins))
