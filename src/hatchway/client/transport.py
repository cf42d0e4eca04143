"""The blocking driver, which carries flows out over HTTP, and what it shares with the one for asyncio (`atransport`).

Drivers decide nothing: what to send, when to try again and what an answer means is in the flows.
"""

import ssl
import time
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import msgspec

from .bodies import Body
from .config import Config, is_loopback
from .errors import BadAnswer, ConnectionFailed, HatchwayError, InvalidRequest
from .steps import Emit, Flow, Open, Pause, Read, Reply, Request, Stream

T = TypeVar("T")
E = TypeVar("E")

KEEP_IDLE = 20
KEEP_IDLE_S = 4.0
"""Shorter than the idle time after which the service closes a connection, so that it is never closed under a request."""
CONNECT_S = 5.0
MAX_ANSWER = 32 * 1024 * 1024
"""Octets of one answer that is not a stream."""


class Common:
    """What both drivers share: how a request looks on the wire and what a failure means."""

    def __init__(self, config: Config, timeout_s: float) -> None:
        self.config = config
        self.timeout_s = timeout_s
        # Loading the certificates of the system takes longer than a whole call, and plain HTTP needs none. A context
        # without certificates trusts nobody, so forgetting to load them could only refuse.
        self._tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._tls_ready = False

    def options(self) -> dict[str, Any]:
        """What the HTTP client is made with."""
        return {
            "verify": self._tls,
            # A proxy from the environment is not for a service on this machine.
            "trust_env": self.config.socket is None and not is_loopback(urlsplit(self.config.url).hostname or ""),
            "timeout": httpx.Timeout(self.timeout_s, connect=CONNECT_S, pool=CONNECT_S),
            "limits": httpx.Limits(
                max_connections=self.config.connections,
                max_keepalive_connections=KEEP_IDLE,
                keepalive_expiry=KEEP_IDLE_S,
            ),
            "follow_redirects": False,
            "headers": {"Accept-Encoding": "identity", "User-Agent": "hatchway-python"},
        }

    def _trust(self) -> None:
        """Loads the authorities that the certificate of a service must be of. Raises `InvalidRequest("ca_unreadable")`."""
        if self.config.ca is None:
            self._tls.load_default_certs()
        else:
            try:
                self._tls.load_verify_locations(self.config.ca)
            except OSError as error:  # what OpenSSL says is one too
                raise InvalidRequest(
                    "ca_unreadable",
                    f"{self.config.ca} cannot be used: {error}",
                    "HATCHWAY_CA_FILE names a file in PEM with the certificates of the authorities to trust.",
                ) from None
        if self.config.also_ca is not None:
            self._tls.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            try:
                self._tls.load_verify_locations(self.config.also_ca)
            except OSError as error:
                raise InvalidRequest("ca_unreadable", f"{self.config.also_ca} cannot be used: {error}") from None
        self._tls_ready = True

    def arguments(self, request: Request, streaming: bool) -> dict[str, Any]:
        """What the HTTP library needs for `request`."""
        url = request.url if "://" in request.url else self.config.url + request.url
        if url.startswith("https:") and not self._tls_ready:
            self._trust()
        headers = dict(request.headers)
        if "://" not in request.url:
            headers.update(self.config.headers)
        token = request.token or self.config.key
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        content: Any = request.content
        if request.json is not None:
            content = msgspec.json.encode(request.json)
            headers["Content-Type"] = "application/json"
        elif content is not None:
            headers.setdefault("Content-Type", "application/octet-stream")
        read_s = request.timeout_s if streaming or request.timeout_s is not None else self.timeout_s
        write_s: float | None = self.timeout_s
        if isinstance(content, Body):
            if content.size is not None:
                headers["Content-Length"] = str(content.size)
            content = self._pieces(content)
            write_s = read_s  # what takes the body is as slow as what answers
        timeout = httpx.Timeout(self.timeout_s, connect=CONNECT_S, pool=CONNECT_S, read=read_s, write=write_s)
        return {"method": request.method, "url": url, "headers": headers, "content": content, "timeout": timeout}

    def _pieces(self, body: Body) -> Any:
        """The octets of a body, as the HTTP library takes them."""
        return body.open()

    @property
    def tls(self) -> ssl.SSLContext:
        """The context that connections beside HTTP use, with the same authorities."""
        if not self._tls_ready:
            self._trust()
        return self._tls

    @contextmanager
    def failures(self) -> Iterator[None]:
        """Turns what the HTTP library raises into errors of ours."""
        try:
            yield
        except httpx.PoolTimeout:
            raise HatchwayError(
                "too_many_connections",
                f"This client has {self.config.connections} connections in use.",
                "Close streams that are no longer read, or use another client.",
            ) from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                raise ConnectionFailed(
                    f"{_origin(error, self.config)} shows a certificate that is not trusted here: {error}",
                    "Check the URL; HATCHWAY_CA_FILE names the authority of a certificate that no public one has signed.",
                    code="not_trusted",
                    sent=False,
                ) from None
            raise ConnectionFailed(f"Nobody answers at {_origin(error, self.config)}: {error}", sent=False) from None
        except httpx.TimeoutException as error:
            raise ConnectionFailed(
                f"{_origin(error, self.config)} did not answer in time.",
                "Try again, or give a larger timeout.",
                code="timeout",
            ) from None
        except (httpx.DecodingError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
            raise BadAnswer("bad_answer", str(error), "Check the URL.") from None
        except httpx.RequestError as error:
            raise ConnectionFailed(
                f"The connection to {_origin(error, self.config)} broke: {error or type(error).__name__}", "Try again."
            ) from None


def _origin(error: httpx.RequestError, config: Config) -> str:
    try:
        url = error.request.url
    except RuntimeError:
        return config.url
    return f"{url.scheme}://{url.netloc.decode('ascii', 'replace')}"


def too_large() -> BadAnswer:
    """The error for an answer beyond `MAX_ANSWER`."""
    return BadAnswer("answer_too_large", f"The answer is larger than {MAX_ANSWER} octets.", "Ask for less: use limits.")


class SyncDriver(Common):
    """Carries flows out in the calling thread. Any number of threads may use one driver."""

    def __init__(self, config: Config, timeout_s: float) -> None:
        super().__init__(config, timeout_s)
        self._http = httpx.Client(**self.options())

    def _pieces(self, body: Body) -> Any:
        pieces = body.open()
        if isinstance(pieces, AsyncIterator):
            raise InvalidRequest(
                "bad_content", "An asynchronous iterator cannot be sent from here.", "Use AsyncHatchway."
            )
        return pieces

    def close(self) -> None:
        """Closes all connections."""
        self._http.close()

    def run(self, flow: Flow[T]) -> T:
        """Returns what `flow` returns, or raises what it raises."""
        outcome: Any = None
        failure: ConnectionFailed | None = None
        while True:
            try:
                step = flow.send(outcome) if failure is None else flow.throw(failure)
            except StopIteration as end:
                return end.value  # type: ignore[no-any-return]  # the type of the generator says what it is
            outcome = failure = None
            try:
                outcome = self._do(step)
            except ConnectionFailed as error:
                failure = error
            except BaseException:
                flow.close()
                raise

    def stream(self, flow: Stream[E]) -> Generator[E, None, None]:
        """Yields what `flow` emits. Closing the generator closes the connection."""
        response: httpx.Response | None = None
        pieces: Iterator[bytes] = iter(())
        outcome: Any = None
        failure: ConnectionFailed | None = None
        try:
            while True:
                try:
                    step = flow.send(outcome) if failure is None else flow.throw(failure)
                except StopIteration:
                    return
                outcome = failure = None
                if isinstance(step, Emit):
                    yield step.item
                    continue
                try:
                    if isinstance(step, Read):
                        with self.failures():
                            outcome = next(pieces, b"")
                    elif isinstance(step, Open):
                        if response is not None:
                            response.close()
                        response, outcome = self._open(step.request)
                        pieces = response.iter_raw() if outcome.status < 400 else iter(())
                    else:
                        outcome = self._do(step)
                except ConnectionFailed as error:
                    failure = error
        finally:
            flow.close()
            if response is not None:
                response.close()

    def _do(self, step: Request | Pause) -> Reply | None:
        if isinstance(step, Pause):
            time.sleep(step.seconds)
            return None
        with self.failures():
            request = self._http.build_request(**self.arguments(step, streaming=False))
            response = self._http.send(request, stream=True)
            try:
                return Reply(response.status_code, response.headers, _collect(response))
            finally:
                response.close()

    def _open(self, step: Request) -> tuple[httpx.Response, Reply]:
        with self.failures():
            request = self._http.build_request(**self.arguments(step, streaming=True))
            response = self._http.send(request, stream=True)
            body = b""
            if response.status_code >= 400:
                try:
                    body = _collect(response)
                finally:
                    response.close()
            return response, Reply(response.status_code, response.headers, body)


def _collect(response: httpx.Response) -> bytes:
    pieces: list[bytes] = []
    size = 0
    for piece in response.iter_bytes():
        size += len(piece)
        if size > MAX_ANSWER:
            raise too_large()
        pieces.append(piece)
    return b"".join(pieces)
