"""A secret in memory: on a locked page of its own, overwritten when it is given up, and nowhere readable by accident."""

import ctypes
import mmap
from typing import NoReturn

from hatchway.domain.errors import HatchwayError, Unprocessable

MIN_OCTETS = 8
"""A shorter one could not be found in a response without hiding half of it."""
MAX_OCTETS = 4096
"""A page."""

_MADV_DONTDUMP = 16
_libc = ctypes.CDLL(None, use_errno=True)


class Secret:
    """The value of a credential. Its text has no way into a log: `repr`, `str` and formatting show none of it, and it cannot be pickled."""

    __slots__ = ("_page", "_size", "locked")

    def __init__(self, value: bytes | bytearray) -> None:
        """Takes a copy of a value. Raises what `check` raises."""
        check(value)
        self._size = len(value)
        self._page = mmap.mmap(-1, MAX_OCTETS)
        self._page.madvise(_MADV_DONTDUMP)
        self._page[: self._size] = bytes(value)
        self.locked = _lock(self._page)

    def reveal(self) -> bytes:
        """The value. Keep what is returned no longer than a call. Raises `ValueError` when it was wiped."""
        return self._page[: self._size]

    def wipe(self) -> None:
        """Overwrites it. May be repeated."""
        if not self._page.closed:
            self._page[: self._size] = bytes(self._size)
            self._page.close()

    def __repr__(self) -> str:
        return "Secret(hidden)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a secret does not leave its process")


def wipe(buffer: bytearray) -> None:
    """Overwrites a buffer that a secret went through."""
    buffer[:] = bytes(len(buffer))


def check(value: bytes | bytearray) -> None:
    """Raises `Unprocessable("credential_value")` for what cannot stand in a header: the text of the error has nothing of it.

    Line ends and NUL would end the header and begin another; other characters would reach the upstream as something else than they are here.
    """
    if not MIN_OCTETS <= len(value) <= MAX_OCTETS:
        raise invalid(f"It has {len(value)} octets.", f"A value has from {MIN_OCTETS} to {MAX_OCTETS} octets.")
    if any(octet < 0x20 or octet > 0x7E for octet in value):
        raise invalid(
            "It has a line end, a NUL, or another character that is not printable ASCII.",
            "Give the bare value. One line end at the end of a file or of standard input is left out by itself.",
        )
    if value[:1] == b" " or value[-1:] == b" ":
        raise invalid("It begins or ends with a space.", "Give the bare value.")


def invalid(cause: str, remedy: str) -> HatchwayError:
    """The error of a value that is none."""
    return Unprocessable("credential_value", f"The value of the credential cannot be used. {cause}", remedy)


def without_line_end(value: bytes) -> bytes:
    """What a file or a variable holds, without the line end that editors put at its end."""
    return value.removesuffix(b"\n").removesuffix(b"\r")


def _lock(page: mmap.mmap) -> bool:
    """Keeps it out of swap; False where the limit of locked memory is reached."""
    held = ctypes.c_char.from_buffer(page)
    try:
        return bool(_libc.mlock(ctypes.c_void_p(ctypes.addressof(held)), ctypes.c_size_t(MAX_OCTETS)) == 0)
    finally:
        del held
