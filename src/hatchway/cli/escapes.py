"""The escape of `hatchway shell`: what is typed behind `~` at the beginning of a line is for us. No I/O."""

from dataclasses import dataclass

HELP = b"~.  leave the terminal, which goes on\r\n~~  type a ~\r\n~?  this\r\n"
_ENDS_LINE = b"\r\n\x03\x04"


@dataclass
class Escapes:
    """Parts what is for the command from what is for us."""

    detached: bool = False
    asked_for_help: bool = False
    _at_start: bool = True
    _pending: bool = False

    def feed(self, typed: bytes) -> bytes:
        """Returns what is for the command; sets `detached` for `~.`, behind which nothing counts, and `asked_for_help` for `~?`."""
        passed = bytearray()
        for octet in typed:
            letter = bytes((octet,))
            if self._pending:
                self._pending = False
                if letter == b".":
                    self.detached = True
                    break
                if letter == b"?":
                    self.asked_for_help = True
                    continue
                if letter != b"~":
                    passed += b"~"
                passed += letter
            elif letter == b"~" and self._at_start:
                self._pending = True
                self._at_start = False
                continue
            else:
                passed += letter
            self._at_start = letter in _ENDS_LINE
        return bytes(passed)
