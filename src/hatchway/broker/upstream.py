"""The connection to an upstream: to an address that was vetted here, or through a proxy of the operator; TLS, verified for the name."""

import asyncio
import base64
import errno
import hashlib
import socket
import ssl
from collections import OrderedDict
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from hatchway.broker.checking import Bound
from hatchway.broker.config import BrokerConfig
from hatchway.domain.policy import addresses
from hatchway.domain.policy.addresses import Address, Network
from hatchway.wire.broker import Leg

MAX_ADDRESSES = 16
MAX_CONTEXTS = 16
ONE_WITHIN_S = 5.0
"""For one address of several."""
BUFFER = 64 * 1024


class DialError(Exception):
    """The upstream cannot be had: `code` is one of `LegAnswer.error`."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Upstream:
    """An open connection, with what it was found to be."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        self.reader = reader
        self.writer = writer
        self.address = address
        self._tls: ssl.SSLObject = writer.get_extra_info("ssl_object")
        self._certificate = self._tls.getpeercert(binary_form=True) or b""
        self.certificate_sha256 = hashlib.sha256(self._certificate).hexdigest()

    def has_key(self, keys: tuple[str, ...]) -> bool:
        """Whether the certificate's public key is one of these, by the SHA-256 of it (Base64)."""
        public = x509.load_der_x509_certificate(self._certificate).public_key()
        octets = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return base64.b64encode(hashlib.sha256(octets).digest()).decode() in keys

    def ended_properly(self) -> bool:
        """After the end of the stream: whether the peer said so, or somebody cut the connection."""
        try:
            return self._tls.read(1) == b""
        except ssl.SSLZeroReturnError:
            return True
        except (ssl.SSLError, ValueError):
            return False


class Dialler:
    """Connects. Its TLS contexts are made when they are first needed: with the system's authorities each takes most of a megabyte."""

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self._reachable = tuple((addresses.parse_network(network), port) for network, port in config.reachable)
        self._contexts: OrderedDict[tuple[tuple[str, ...], str], ssl.SSLContext] = OrderedDict()

    async def dial(self, leg: Leg, bound: Bound) -> Upstream:
        """Connects to where a leg leads. Raises `DialError`."""
        context = self._context(bound.binding.upstream_ca, bound.binding.tls_min)
        try:
            async with asyncio.timeout(self._config.limits.connect_within_s):
                sock, address = await self._connect(leg, bound)
                try:
                    reader, writer = await asyncio.open_connection(
                        sock=sock, ssl=context, server_hostname=leg.host, limit=BUFFER
                    )
                except BaseException:
                    sock.close()
                    raise
        except TimeoutError:
            raise DialError("connect_failed", f"{leg.host} does not answer in time.") from None
        except ssl.SSLCertVerificationError as error:
            raise DialError(
                "tls_failed", f"The certificate is not one for {leg.host}: {error.verify_message}."
            ) from None
        except ssl.SSLError as error:
            raise DialError(
                "tls_failed", f"No TLS with {leg.host}: {error.reason or 'the handshake failed'}."
            ) from None
        except OSError as error:
            raise DialError("tls_failed", f"{leg.host} ended the connection: {error.strerror or 'no TLS'}.") from None
        writer.transport.set_write_buffer_limits(high=BUFFER)
        upstream = Upstream(reader, writer, address)
        if bound.binding.upstream_spki and not upstream.has_key(bound.binding.upstream_spki):
            writer.transport.abort()
            raise DialError("tls_failed", f"The certificate of {leg.host} has none of the public keys of the rule.")
        return upstream

    async def _connect(self, leg: Leg, bound: Bound) -> tuple[socket.socket, str]:
        if leg.via:
            return await self._through(leg, bound), "proxy"
        vetted = [self._vet(text, leg, bound) for text in leg.addresses[:MAX_ADDRESSES]]
        if not vetted:
            raise DialError("connect_failed", f"No address of {leg.host} was given.")
        loop = asyncio.get_running_loop()
        cause = ""
        for address in vetted:
            family = socket.AF_INET if address.version == 4 else socket.AF_INET6
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                async with asyncio.timeout(ONE_WITHIN_S if len(vetted) > 1 else None):
                    await loop.sock_connect(sock, (str(address), leg.port))
                return sock, str(address)
            except (OSError, TimeoutError) as error:
                cause = getattr(error, "strerror", None) or "it does not answer in time"
                sock.close()
            except BaseException:
                sock.close()
                raise
        raise DialError("connect_failed", f"{leg.host} cannot be reached at {leg.port}: {cause}.")

    def _vet(self, text: str, leg: Leg, bound: Bound) -> Address:
        """Judges an address anew: what a gateway says of it is not taken for it."""
        try:
            address = addresses.parse_address(text)
        except ValueError:
            raise DialError("address_denied", f"{text[:64]!r} is no address.") from None
        offered = [network for network, port in self._reachable if port == leg.port]
        if _within(address, offered) and _within(address, bound.private):
            return address
        why = addresses.refusal(address, private=bound.private, own=(address,) if _is_own(address) else ())
        if why is not None:
            raise DialError("address_denied", f"{why}.")
        return address

    async def _through(self, leg: Leg, bound: Bound) -> socket.socket:
        """A proxy is asked for the name, or for an address where one is given."""
        if leg.via not in self._config.proxies:
            raise DialError("proxy_failed", "The broker's configuration has no such proxy.")
        from python_socks import ProxyConnectionError, ProxyError, ProxyTimeoutError  # late: few have a proxy
        from python_socks.async_.asyncio import Proxy

        where = str(self._vet(leg.addresses[0], leg, bound)) if leg.addresses else leg.host
        try:
            sock: socket.socket = await Proxy.from_url(leg.via).connect(where, leg.port)
        except (ProxyError, ProxyConnectionError, ProxyTimeoutError, OSError) as error:
            # The kind alone: the proxy's URL may have a password in it.
            raise DialError(
                "proxy_failed", f"The proxy does not lead to {leg.host} ({type(error).__name__})."
            ) from None
        return sock

    def _context(self, authorities: tuple[str, ...], tls_min: str) -> ssl.SSLContext:
        at = authorities, tls_min
        context = self._contexts.pop(at, None)
        if context is None:
            context = ssl.create_default_context(cadata="\n".join(authorities) or None)
            for file in () if authorities else self._config.upstream_ca:
                context.load_verify_locations(file)
            context.minimum_version = ssl.TLSVersion.TLSv1_3 if tls_min == "1.3" else ssl.TLSVersion.TLSv1_2
            context.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_NO_COMPRESSION | ssl.OP_NO_TICKET
            context.set_alpn_protocols(["http/1.1"])
            while len(self._contexts) >= MAX_CONTEXTS:
                self._contexts.popitem(last=False)
        self._contexts[at] = context
        return context


def _within(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks if network.version == address.version)


def _is_own(address: Address) -> bool:
    """Whether it is an address of this host: then a socket can have it. Where every address can be had, none is dialled."""
    family = socket.AF_INET if address.version == 4 else socket.AF_INET6
    try:
        with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as probe:
            probe.bind((str(address), 0))
    except OSError as error:
        return error.errno not in (errno.EADDRNOTAVAIL, errno.EINVAL, errno.EAFNOSUPPORT)
    return True
