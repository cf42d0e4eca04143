"""The oracle: which attacks' markers arrived where. What a client was told does not count."""

import re
import secrets
import threading

_MARK = re.compile(rb"hx[0-9a-f]{12}z")
MARK_LENGTH = 15


def new_mark() -> str:
    """A marker that is in one attempt alone. It is a label of a DNS name, a token, and part of a path."""
    return f"hx{secrets.token_hex(6)}z"


class Oracle:
    """Remembers the places where each marker was seen. Servers call it from their threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[str, list[str]] = {}
        self.octets = 0
        """How many octets were looked at."""

    def note(self, where: str, data: bytes) -> None:
        """Looks through octets that arrived at a place, in whatever case they are."""
        with self._lock:
            self.octets += len(data)
            for found in _MARK.findall(data.lower()):
                places = self._seen.setdefault(found.decode("ascii"), [])
                if where not in places:
                    places.append(where)

    def where(self, mark: str) -> list[str]:
        """The places that a marker arrived at."""
        with self._lock:
            return list(self._seen.get(mark, ()))


class Tail:
    """One stream's view of the oracle: a marker counts although it came in two pieces."""

    def __init__(self, oracle: Oracle, where: str) -> None:
        self._oracle = oracle
        self._where = where
        self._kept = b""

    def note(self, data: bytes) -> None:
        """Looks through the next octets."""
        self._oracle.note(self._where, self._kept + data)
        self._kept = (self._kept + data)[-(MARK_LENGTH - 1) :]
