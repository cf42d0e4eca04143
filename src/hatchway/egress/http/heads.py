"""Heads of HTTP/1.1 messages: strict, bounded, and without input or output. What is not plainly one thing is refused.

Nobody behind us may read a message in another way than we did: line ends are CRLF alone, there is one `Host`, one way to tell
where the body ends, no folded field, no target but a path (RFC 9112, where it leaves a choice always the narrow one).
"""

import re
from dataclasses import dataclass

from hatchway.domain.errors import BadGateway, HatchwayError, HeadTooLarge, InvalidRequest, MethodNotAllowed

MAX_HEAD = 32 * 1024
MAX_FIELDS = 100
MAX_LINE = 8 * 1024
"""Octets of a request's head, its fields, octets of one line."""
MAX_ANSWER_HEAD = 64 * 1024
MAX_ANSWER_FIELDS = 200
MAX_ANSWER_LINE = 16 * 1024

NEVER = frozenset({"CONNECT", "TRACE", "TRACK"})
"""Methods that no rule allows: one opens a tunnel, two give back what was put into the request."""

Fields = list[tuple[str, str]]
"""Names in lower case, values without the space around them (as Latin-1), in the order in which they came."""

_REQUEST_LINE = re.compile(r"([A-Z][A-Z-]{0,31}) (/[!\"$-~]*) HTTP/1\.([01])", re.ASCII)
_STATUS_LINE = re.compile(r"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: ([\t -~\x80-\xff]*))?", re.ASCII)
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]{1,256}", re.ASCII)
_CONTROL = re.compile(r"[\x00-\x08\x0a-\x1f\x7f]")
_BROKEN_LINE = re.compile(rb"(?<!\r)\n|\r(?=[^\n])")
_LENGTH = re.compile(r"[0-9]{1,15}", re.ASCII)
FRAMING = frozenset({"content-length", "transfer-encoding", "host", "connection", "upgrade", "expect", "te"})

_names: dict[str, str] = {}
"""Spellings of field names that were found good, and their lower case: a bounded memory of what clients write again and again."""
_MAX_NAMES = 1_024


class Unclear(ValueError):
    """The head can be read in two ways, or in none."""


@dataclass(slots=True)
class RequestHead:
    """What a client asks, taken apart."""

    method: str
    target: str
    """As sent: begins with `/`, visible ASCII, without `#`."""
    version: str
    """`1.1` or `1.0`."""
    fields: Fields
    host: str | None
    """As sent; None: a request of HTTP/1.0 without one."""
    length: int | None = 0
    """Octets of the body; None: it is chunked."""
    keep: bool = True
    """Another request may follow."""
    expects: bool = False
    """The client waits for `100 Continue` before it sends the body."""
    upgrade: str = ""
    """What it wants to go on with, in lower case, when it also says so in `Connection`."""
    nominated: frozenset[str] = frozenset()
    """Fields that end here, because `Connection` names them."""


@dataclass(slots=True)
class AnswerHead:
    """What an upstream answers, taken apart."""

    status: int
    reason: str
    fields: Fields
    length: int | None = 0
    """Octets of the body; None: chunked, or up to the end of the connection (`to_end`)."""
    chunked: bool = False
    to_end: bool = False
    keep: bool = True
    nominated: frozenset[str] = frozenset()


def end_of_head(data: bytes, start: int = 0, limit: int = MAX_HEAD) -> int:
    """Where the head at the beginning of `data` ends (behind its empty line); -1: not yet. `start`: what was looked through before.

    Raises `HeadTooLarge`, and `InvalidRequest` as soon as a line ends in anything but CRLF, so that nobody waits for a better end.
    """
    end = data.find(b"\r\n\r\n", max(0, start - 3), limit)
    if end >= 0:
        return end + 4
    if len(data) >= limit:
        raise HeadTooLarge(
            "head_too_large",
            f"The request line and the headers take more than {limit} octets.",
            "Send fewer or shorter headers, or a shorter URL.",
            limit=limit,
        )
    if _BROKEN_LINE.search(data, max(0, start - 1)):
        raise malformed("a line ends in a bare CR or LF")
    return -1


def parse_request(head: bytes) -> RequestHead:
    """Takes a whole head apart. Raises `InvalidRequest`, `MethodNotAllowed` and `HeadTooLarge`."""
    lines = _lines(head)
    first = _REQUEST_LINE.fullmatch(lines[0])
    if first is None:
        raise _bad_request_line(lines[0])
    if len(lines) > MAX_FIELDS + 1 or (len(head) > MAX_LINE and any(len(line) > MAX_LINE for line in lines)):
        raise HeadTooLarge(
            "head_too_large",
            f"There are more than {MAX_FIELDS} headers, or one line takes more than {MAX_LINE} octets.",
            "Send fewer or shorter headers, or a shorter URL.",
            limit=MAX_HEAD,
        )
    method, target, minor = first.groups()
    if method in NEVER:
        raise never(method)
    parsed = RequestHead(method, target, "1." + minor, [], None)
    try:
        parsed.fields = _fields(lines)
        _read_request_fields(parsed)
    except Unclear as error:
        raise malformed(str(error)) from error
    return parsed


def parse_answer(head: bytes, method: str) -> AnswerHead:
    """Takes the head of an answer to a request of `method` apart. Raises `BadGateway("upstream_bad_answer")`."""
    try:
        lines = _lines(head)
        first = _STATUS_LINE.fullmatch(lines[0])
        if first is None:
            raise Unclear("its status line is none of HTTP/1.1")
        if len(lines) > MAX_ANSWER_FIELDS + 1:
            raise Unclear(f"it has more than {MAX_ANSWER_FIELDS} headers")
        if len(head) > MAX_ANSWER_LINE and any(len(line) > MAX_ANSWER_LINE for line in lines):
            raise Unclear(f"one line takes more than {MAX_ANSWER_LINE} octets")
        minor, status, reason = first.groups()
        answer = AnswerHead(int(status), (reason or "").strip("\t "), _fields(lines), keep=minor == "1")
        _read_answer_fields(answer, method, minor)
    except Unclear as error:
        raise bad_answer(str(error)) from error
    except HatchwayError as error:
        raise bad_answer(error.cause) from error
    return answer


def malformed(why: str) -> InvalidRequest:
    """The error of a request that is none, or more than one."""
    return InvalidRequest(
        "malformed_request",
        f"What came is no request of HTTP/1.1 that can be read in one way only: {why}.",
        "Send it as RFC 9112 says; the gateway repairs nothing.",
    )


def never(method: str) -> MethodNotAllowed:
    """The error of a method that no rule allows."""
    return MethodNotAllowed(
        "method_never_allowed",
        f"{method} is never let through, whatever a policy says.",
        "Use another method; a tunnel is not needed: connect to the host itself.",
    )


def bad_answer(why: str) -> BadGateway:
    """The error of an upstream that answers what is no answer, or two."""
    return BadGateway(
        "upstream_bad_answer",
        f"What the host answered is no answer in HTTP/1.1 that can be read in one way only: {why}.",
        "Look at the server; nothing of its answer was passed on.",
    )


def _lines(head: bytes) -> list[str]:
    text = head[:-4].decode("latin-1")
    if _CONTROL.search(text.replace("\r\n", "")):
        raise malformed("there is a control character in the head, or a line that ends in a bare CR or LF")
    return text.split("\r\n")


def _bad_request_line(line: str) -> HatchwayError:
    words = line.split(" ")
    if len(words) != 3:
        return malformed("the request line is not `METHOD /path HTTP/1.1` with single spaces")
    method, target, version = words
    if method in NEVER:
        return never(method)
    if version not in ("HTTP/1.1", "HTTP/1.0"):
        return malformed("the version is neither HTTP/1.1 nor HTTP/1.0")
    if not target.startswith("/"):
        return malformed("the target is not a path that begins with `/`; the host is told in `Host` alone")
    if not re.fullmatch(r"[A-Z][A-Z-]{0,31}", method, re.ASCII):
        return malformed("the method is not 1 to 32 capital letters")
    return malformed("the target has a character that has to be percent-encoded, or a `#`")


def _fields(lines: list[str]) -> Fields:
    fields: Fields = []
    known = _names
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        lower = known.get(name)
        if lower is None:
            lower = _new_name(name, colon)
        elif not colon:
            raise Unclear("a header has no colon")
        fields.append((lower, value.strip(" \t")))
    return fields


def _new_name(name: str, colon: str) -> str:
    folded = name[:1] in (" ", "\t")
    if not colon and not folded:
        raise Unclear("a header has no colon")
    if not _NAME.fullmatch(name):
        raise Unclear(
            "a header is folded over two lines" if folded else "a header's name has a character that is none of a name"
        )
    lower = name.lower()
    if "_" in lower and lower.replace("_", "-") in FRAMING:
        raise Unclear("a header is spelled with `_` that servers may take for one that says where the body ends")
    if len(_names) < _MAX_NAMES and len(name) <= 64:
        _names[name] = lower
    return lower


def _read_request_fields(head: RequestHead) -> None:
    length = coding = None
    connection: list[str] = []
    upgrade: list[str] = []
    for name, value in head.fields:
        if name not in FRAMING:
            continue
        if name == "host":
            if head.host is not None:
                raise Unclear("there is more than one Host")
            head.host = value
        elif name == "content-length":
            if length is not None or not _LENGTH.fullmatch(value):
                raise Unclear("Content-Length is not one number of 1 to 15 digits")
            length = int(value)
        elif name == "transfer-encoding":
            if coding is not None or value.lower() != "chunked":
                raise Unclear("Transfer-Encoding is not `chunked` once")
            coding = value
        elif name == "connection":
            connection.append(value)
        elif name == "upgrade":
            upgrade.append(value)
        elif name == "expect":
            if head.expects or value.lower() != "100-continue":
                raise Unclear("Expect is not `100-continue` once")
            head.expects = True
    if coding is not None:
        if length is not None:
            raise Unclear("there are both Content-Length and Transfer-Encoding")
        if head.version == "1.0":
            raise Unclear("HTTP/1.0 has no Transfer-Encoding")
    if head.host is None and head.version == "1.1":
        raise Unclear("there is no Host")
    head.length = length or 0 if coding is None else None
    head.nominated = _nominated(connection)
    head.keep = head.version == "1.1" and "close" not in head.nominated
    if head.expects and (head.version == "1.0" or head.length == 0):
        head.expects = False
    if upgrade and "upgrade" in head.nominated:
        head.upgrade = ", ".join(upgrade).lower()


def _read_answer_fields(answer: AnswerHead, method: str, minor: str) -> None:
    length = coding = None
    connection: list[str] = []
    for name, value in answer.fields:
        if name not in FRAMING:
            continue
        if name == "content-length":
            if length is not None or not _LENGTH.fullmatch(value):
                raise Unclear("Content-Length is not one number of 1 to 15 digits")
            length = int(value)
        elif name == "transfer-encoding":
            if coding is not None or value.lower() != "chunked" or minor == "0":
                raise Unclear("Transfer-Encoding is not `chunked` once, in HTTP/1.1")
            coding = value
        elif name == "connection":
            connection.append(value)
    if coding is not None and length is not None:
        raise Unclear("there are both Content-Length and Transfer-Encoding")
    answer.nominated = _nominated(connection)
    answer.keep = answer.keep and "close" not in answer.nominated
    if method == "HEAD" or answer.status < 200 or answer.status in (204, 304):
        answer.length = 0
    elif coding is not None:
        answer.length, answer.chunked = None, True
    elif length is not None:
        answer.length = length
    else:
        answer.length, answer.to_end, answer.keep = None, True, False


def _nominated(values: list[str]) -> frozenset[str]:
    if not values:
        return frozenset()
    if len(values) == 1 and values[0] in ("keep-alive", "close"):
        return frozenset(values)
    names = {one.strip(" \t").lower() for value in values for one in value.split(",")} - {""}
    if not all(_NAME.fullmatch(name) for name in names):
        raise Unclear("Connection names what is no header")
    return frozenset(names)
