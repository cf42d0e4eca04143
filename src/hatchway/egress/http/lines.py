"""A connection to the outside that speaks HTTP/1.1: requests are written as they were decided, answers are taken apart strictly."""

from collections.abc import Iterable

from hatchway.domain.errors import BadGateway, HatchwayError, Unavailable
from hatchway.egress.http import framing, heads
from hatchway.egress.http.heads import AnswerHead, Fields, Unclear, bad_answer
from hatchway.egress.http.seam import Stream, StreamLost
from hatchway.egress.http.waiting import Alarm

ANSWER_WITHIN_S = 600.0
"""How long a server may take before its answer begins: models think long."""
ANSWER_IDLE_S = 300.0
"""How long it may pause within one."""
DRAIN_WITHIN_S = 30.0
_MAX_INTERIM = 16


class Stale(Exception):
    """A kept connection was closed by the other side before it heard this request; another one may be tried."""


def head_of(first: str, fields: Iterable[tuple[str, str]]) -> bytes:
    """A head as it goes over the wire. Both come from our parser and our tables: none has a line end in it."""
    lines = [f"{name}: {value}\r\n" for name, value in fields]
    return f"{first}\r\n{''.join(lines)}\r\n".encode("latin-1")


def request_head(method: str, target: str, host: str, fields: Fields, length: int | None) -> bytes:
    """The head of a request. `length` None: its body will come in chunks."""
    framed = [("host", host), *fields]
    if length is None:
        framed.append(("transfer-encoding", "chunked"))
    elif length or method in ("POST", "PUT", "PATCH"):
        framed.append(("content-length", str(length)))
    return head_of(f"{method} {target} HTTP/1.1", framed)


class Line:
    """One connection to the outside, for one request at a time."""

    def __init__(self, stream: Stream, key: object) -> None:
        self.stream = stream
        self.key = key
        self.idle_since: float | None = None
        """When its last answer ended (loop time); None: it was not used yet, or is in use."""
        self.used = False
        self.heard = False
        """Something of the answer to the present request came."""
        self.reusable = False
        self._keeps = False
        self._data = b""
        self._body: framing.Body = framing.Measured(0)

    def write_request(self, octets: bytes) -> None:
        """Writes the head of a request (`request_head`), and what of its body is here."""
        self.heard = self.reusable = False
        self.stream.write(octets)

    def write_piece(self, piece: bytes, *, chunked: bool) -> None:
        """Writes octets of the request's body."""
        self.stream.write(framing.chunk(piece) if chunked else piece)

    def end_chunks(self) -> None:
        """The body that went in chunks is whole."""
        self.stream.write(framing.LAST_CHUNK)

    async def drain(self, alarm: Alarm) -> None:
        """Waits until the other side took enough. Raises `StreamLost` and `TimeoutError`."""
        await alarm.within(DRAIN_WITHIN_S, self.stream.drain())

    async def answer(self, method: str, alarm: Alarm, *, upgraded: bool = False) -> AnswerHead:
        """The head of the answer; interim ones end here. `upgraded`: 101 is what was asked for.

        Raises `Stale`, and `BadGateway` (`upstream_bad_answer upstream_no_answer`).
        """
        for _ in range(_MAX_INTERIM):
            head = heads.parse_answer(await self._head(alarm), method)
            if head.status >= 200:
                break
            if head.status == 101:
                if upgraded:
                    break
                raise bad_answer("it goes on with another protocol, which was not asked for")
        else:
            raise bad_answer(f"there are more than {_MAX_INTERIM} interim answers")
        self._body = framing.of_answer(head.length, chunked=head.chunked)
        self.reusable = head.keep and self._body.done
        self._keeps = head.keep
        return head

    async def piece(self, alarm: Alarm) -> bytes:
        """The next octets of the answer's body; `b""` at its end. Raises `BadGateway` and `StreamLost` when it is cut off."""
        body = self._body
        while not body.done:
            if body.ready:
                piece, self._data = self._take(b"")
            else:
                data, self._data = self._data, b""
                if not data:
                    data = await self._read(ANSWER_IDLE_S, alarm)
                    if not data:
                        if isinstance(body, framing.ToEnd):
                            body.done = True
                            break
                        raise StreamLost("the answer was cut off")
                piece, self._data = self._take(data)
            if piece:
                return piece
        self.reusable = self._keeps and not self._data
        return b""

    @property
    def whole(self) -> bool:
        """The body was read to its end."""
        return self._body.done

    def rest(self) -> bytes:
        """What came behind the head, after an upgrade."""
        data, self._data = self._data, b""
        return data

    @property
    def fit(self) -> bool:
        """It can take another request: nothing came unasked, and it was not closed."""
        return self.reusable and not self._data and not self.stream.lost and not self.stream.buffered

    def _take(self, data: bytes) -> tuple[bytes, bytes]:
        try:
            return self._body.take(data)
        except Unclear as error:
            raise bad_answer(str(error)) from error

    async def _head(self, alarm: Alarm) -> bytes:
        looked = 0
        while True:
            if self._data:
                self.heard = True
                try:
                    end = heads.end_of_head(self._data, looked, heads.MAX_ANSWER_HEAD)
                except HatchwayError as error:
                    raise bad_answer(error.cause) from error
                if end >= 0:
                    head, self._data = self._data[:end], self._data[end:]
                    return head
                looked = len(self._data)
            try:
                data = await self._read(ANSWER_WITHIN_S, alarm)
            except StreamLost as error:
                raise self._unanswered("the connection was lost before the answer") from error
            if not data:
                raise self._unanswered("it closed the connection without an answer")
            self._data += data

    def _unanswered(self, why: str) -> Exception:
        if self.used and not self.heard:
            return Stale(why)
        return no_answer(why)

    async def _read(self, within: float, alarm: Alarm) -> bytes:
        try:
            return await alarm.within(within, self.stream.read())
        except TimeoutError:
            raise no_answer(f"nothing came for {within:g} s") from None


def no_answer(why: str) -> BadGateway:
    """The error of an upstream that took the request and gave nothing."""
    return BadGateway(
        "upstream_no_answer", f"The host took the request and did not answer: {why}.", "Try again; look at the server."
    )


def no_broker() -> Unavailable:
    """The error of a broker that took a request and ended the connection."""
    return Unavailable(
        "cred_unavailable",
        "The connection to the broker of credentials ended before the whole answer came; whether the request was sent is not known.",
        "The broker is started again by itself: repeat the request in a moment, if that does no harm.",
    )
