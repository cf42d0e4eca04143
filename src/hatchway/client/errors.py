"""Every error that the SDK raises, built from the problem document that the service answered with.

```
HatchwayError
├── InvalidRequest      400  the request can never succeed as it is
├── Unauthenticated     401  no key or token, or one that is not valid
├── Forbidden           403  a valid one that may not do this
├── NotFound            404
├── TooSlow             408  the request, or its body, did not come in time
├── Conflict            409  not in this state, or not beside the operation in flight
├── Gone                410  it was there and is no more
├── TooLarge            413
├── UnsupportedMedia    415  a body of another media type than the path takes
├── Unprocessable       422  well-formed but out of range
├── Exhausted           429  a quota or a bound was reached; later it may work
├── RangeUnsatisfiable  416  files: the range begins behind the end
├── Misdirected         421  the host that is named is not served there
├── HeadTooLarge        431  the request line and the headers
├── Internal            500  the service's fault
├── BadGateway          502  what runs in the sandbox gave no answer that could be passed on
├── Unavailable         503  a part of the service or of the host is not there now
├── HostExhausted       507  the host is out of disk or memory
├── OperationFailed          a lifecycle operation was accepted and then failed
├── WaitTimeout              the operation goes on, but longer than the caller wanted to wait
├── CommandFailed            `Result.check()`: the command did not exit with 0
├── OutputLimit              a command wrote more than `run`, or a file has more than `read` may hold in memory
├── TransferFailed           files: something on this machine does not go, or what came is not whole
│   └── UnsafeArchive        what the sandbox sent as an archive is none, or would write elsewhere
├── BadAnswer                the answer is not of this protocol
└── ConnectionFailed         nobody answered, or the connection broke
    └── StreamLost           a stream broke and could not be taken up again
```
"""

import msgspec


class HatchwayError(Exception):
    """An error with a stable `code` for programs, and a `cause` and a `remedy` for people.

    `status` is the HTTP status, 0 for what did not come from an answer. `extra` holds the further members of the problem
    document, for example the id of the operation in flight.
    """

    status: int = 0

    def __init__(self, code: str, cause: str, remedy: str = "", **extra: object) -> None:
        super().__init__(f"{code}: {cause}" + (f" {remedy}" if remedy else ""))
        self.code = code
        self.cause = cause
        self.remedy = remedy
        self.extra = extra

    def as_dict(self) -> dict[str, object]:
        """Returns the error as it is shown by `--json`."""
        return {"code": self.code, "cause": self.cause, "remedy": self.remedy, "status": self.status, **self.extra}


class InvalidRequest(HatchwayError):
    """The request is malformed: it can never succeed as it is."""

    status = 400


class Unauthenticated(HatchwayError):
    """No key or token was sent, or it is unknown, expired or revoked."""

    status = 401


class Forbidden(HatchwayError):
    """The key or token is valid, but not for this."""

    status = 403


class NotFound(HatchwayError):
    """There is no such thing, or it belongs to another project."""

    status = 404


class TooSlow(HatchwayError):
    """The request, or its body, did not come within its bound of time."""

    status = 408


class Conflict(HatchwayError):
    """The thing is in a state, or has an operation in flight, that does not admit this."""

    status = 409


class Gone(HatchwayError):
    """The thing was there and is no more."""

    status = 410


class TooLarge(HatchwayError):
    """The request body or one of its parts is larger than its bound."""

    status = 413


class UnsupportedMedia(HatchwayError):
    """The request body is of a media type that the path does not take."""

    status = 415


class Unprocessable(HatchwayError):
    """The request is well-formed, but a value is out of range or names something that does not exist."""

    status = 422


class Exhausted(HatchwayError):
    """A quota or a bound of concurrency was reached."""

    status = 429


class RangeUnsatisfiable(HatchwayError):
    """The range of octets that was asked for begins behind the end of the file."""

    status = 416


class Misdirected(HatchwayError):
    """The request names a host that what it came to does not serve."""

    status = 421


class HeadTooLarge(HatchwayError):
    """The request line and the headers are larger than their bound."""

    status = 431


class Internal(HatchwayError):
    """Something of the service went wrong; its log has the details."""

    status = 500


class BadGateway(HatchwayError):
    """What runs in the sandbox, which answers on its own authority, said what it may not, or nothing in time."""

    status = 502


class Unavailable(HatchwayError):
    """A process of the service, or something of its host, is not there now."""

    status = 503


class HostExhausted(HatchwayError):
    """The host has not enough disk or memory."""

    status = 507


class OperationFailed(HatchwayError):
    """An operation was accepted and then failed or was cancelled; `operation_id` and `sandbox_id` name it."""

    def __init__(
        self, code: str, cause: str, remedy: str = "", *, operation_id: str, sandbox_id: str | None, **extra: object
    ) -> None:
        super().__init__(code, cause, remedy, operation_id=operation_id, sandbox_id=sandbox_id, **extra)
        self.operation_id = operation_id
        self.sandbox_id = sandbox_id


class WaitTimeout(HatchwayError):
    """The operation `operation_id` had not ended when the time to wait for it was over; it goes on."""

    def __init__(self, operation_id: str, waited_s: float, sandbox_id: str | None = None) -> None:
        super().__init__(
            "wait_timeout",
            f"Operation {operation_id} had not ended after {waited_s:g} s.",
            f"It goes on: hatchway operations {operation_id}",
            operation_id=operation_id,
            sandbox_id=sandbox_id,
        )
        self.operation_id = operation_id
        self.sandbox_id = sandbox_id


class CommandFailed(HatchwayError):
    """The command did not exit with 0; raised by `Result.check()` only."""


class OutputLimit(HatchwayError):
    """A command wrote more, or a file has more, than the caller was ready to hold in memory; the command was killed."""


class TransferFailed(HatchwayError):
    """A file or folder could not be read or written on this machine, or changed on the way."""


class UnsafeArchive(TransferFailed):
    """What the sandbox sent as an archive is malformed, leads out of its folder, or is larger than was allowed."""


class BadAnswer(HatchwayError):
    """What came back is not of this protocol: something else listens there, or the versions do not fit."""


class ConnectionFailed(HatchwayError):
    """Nobody answered, or the connection broke.

    `sent` tells whether the request may have reached the service.
    """

    def __init__(self, cause: str, remedy: str = "", *, code: str = "connection_failed", sent: bool = True) -> None:
        super().__init__(code, cause, remedy or "Is the service running? Start it with: hatchway up")
        self.sent = sent


class StreamLost(ConnectionFailed):
    """A stream broke and could not be taken up again within the bounds; the command may still run."""

    def __init__(self, cause: str, remedy: str) -> None:
        super().__init__(cause, remedy, code="stream_lost")


_BY_STATUS: dict[int, type[HatchwayError]] = {
    cls.status: cls
    for cls in (
        InvalidRequest,
        Unauthenticated,
        Forbidden,
        NotFound,
        TooSlow,
        Conflict,
        Gone,
        TooLarge,
        UnsupportedMedia,
        Unprocessable,
        Exhausted,
        RangeUnsatisfiable,
        Misdirected,
        BadGateway,
        HeadTooLarge,
        Internal,
        Unavailable,
        HostExhausted,
    )
}
_QUOTED = 200  # octets of an answer that is no problem document
_KNOWN_MEMBERS: frozenset[str] = frozenset({"type", "title", "status", "detail", "code", "cause", "remedy", "sent"})


class _Problem(msgspec.Struct):
    code: str = ""
    cause: str = ""
    remedy: str = ""
    detail: str = ""
    title: str = ""


def from_problem(status: int, body: bytes) -> HatchwayError:
    """Builds the error for an answer with `status` >= 400.

    A body that is no problem document (a proxy in between answered, say) gives `BadAnswer` with its beginning quoted. An
    unknown status becomes the class of its hundreds: `InvalidRequest` or `Internal`.
    """
    try:
        problem = msgspec.json.decode(body, type=_Problem)
        members = msgspec.json.decode(body, type=dict[str, object])
    except (msgspec.DecodeError, UnicodeDecodeError):
        problem, members = _Problem(), {}
    if not problem.code:
        quoted = body[:_QUOTED].decode("utf-8", "replace").strip()
        return BadAnswer(
            "bad_answer",
            f"The answer has status {status} and is no problem document: {quoted or '(empty)'}",
            "Check the URL: something else may be listening there.",
            http_status=status,
        )
    kind = _BY_STATUS.get(status) or (Internal if status >= 500 else InvalidRequest)
    extra = {key: value for key, value in members.items() if key not in _KNOWN_MEMBERS}
    error = kind(problem.code, problem.cause or problem.detail or problem.title, problem.remedy, **extra)
    error.status = status
    return error
