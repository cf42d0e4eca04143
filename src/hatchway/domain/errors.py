"""Every error that a user can meet, as code, cause and remedy.

```
HatchwayError
├── InvalidRequest      400  the request can never succeed as it is
│   └── MethodNotAllowed 405  the path takes other methods
├── Unauthenticated     401  no key or token, or one that is not valid
├── Forbidden           403  a valid one that may not do this
├── NotFound            404
├── TooSlow             408  what was begun did not come in time
├── Conflict            409  not in this state, or not beside the operation in flight
├── Gone                410  it was there and is no more
├── TooLarge            413
├── UnsupportedMedia    415  a body of another media type than the path takes
├── RangeUnsatisfiable  416  the file has nothing there
├── Misdirected         421  the host name of the request is not one of what it came to
├── Unprocessable       422  well-formed but out of range
├── Exhausted           429  a quota or a bound was reached; later it may work
├── HeadTooLarge        431  the request line and the headers
├── Internal            500  our fault
├── BadGateway           502  what runs in the sandbox answered what it may not, or nothing
├── Unavailable         503  a part of Hatchway or of the host is not there now
└── HostExhausted       507  the host is out of disk or memory
```
"""

from typing import ClassVar


class HatchwayError(Exception):
    """An error with a stable `code` for programs, and a `cause` and a `remedy` for people.

    `status` is the HTTP status that the API answers with. `extra` holds further members of the problem document,
    for example the id of the operation in flight.
    """

    status: ClassVar[int] = 500

    def __init__(self, code: str, cause: str, remedy: str = "", **extra: object) -> None:
        super().__init__(f"{code}: {cause}")
        self.code = code
        self.cause = cause
        self.remedy = remedy
        self.extra = extra

    def as_dict(self) -> dict[str, object]:
        """Returns the members that travel between our processes and into operation rows."""
        return {"code": self.code, "cause": self.cause, "remedy": self.remedy, **self.extra}


class InvalidRequest(HatchwayError):
    """The request is malformed: it can never succeed as it is."""

    status = 400


class MethodNotAllowed(InvalidRequest):
    """The path exists, the method does not."""

    status = 405


class Unauthenticated(HatchwayError):
    """No key or token came with the request, or it is unknown, expired or revoked."""

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


class RangeUnsatisfiable(HatchwayError):
    """The range of octets that is asked for begins behind the end of the file, whose `size` comes along."""

    status = 416


class HeadTooLarge(HatchwayError):
    """The request line and the headers are larger than their bound."""

    status = 431


class Misdirected(HatchwayError):
    """The request names a host that what it came to does not serve."""

    status = 421


class Unprocessable(HatchwayError):
    """The request is well-formed, but a value is out of range or names something that does not exist."""

    status = 422


class Exhausted(HatchwayError):
    """A quota or a bound of concurrency was reached."""

    status = 429


class Internal(HatchwayError):
    """Something of ours went wrong; the log of the process has the details."""

    status = 500


class BadGateway(HatchwayError):
    """What runs in the sandbox, which answers on its own authority, said what it may not, or nothing in time."""

    status = 502


class Unavailable(HatchwayError):
    """A process of Hatchway, or something of the host that it needs, is not there now."""

    status = 503


class HostExhausted(HatchwayError):
    """The host has not enough disk or memory."""

    status = 507


_BY_STATUS: dict[int, type[HatchwayError]] = {
    cls.status: cls
    for cls in (
        InvalidRequest,
        Unauthenticated,
        Forbidden,
        NotFound,
        MethodNotAllowed,
        TooSlow,
        Conflict,
        Gone,
        TooLarge,
        UnsupportedMedia,
        RangeUnsatisfiable,
        Misdirected,
        Unprocessable,
        Exhausted,
        Internal,
        BadGateway,
        Unavailable,
        HostExhausted,
    )
}


def from_status(status: int, code: str, cause: str, remedy: str = "", **extra: object) -> HatchwayError:
    """Rebuilds an error that came over a wire; an unknown status becomes `Internal`."""
    return _BY_STATUS.get(status, Internal)(code, cause, remedy, **extra)
