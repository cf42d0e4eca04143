"""One line per event on standard error, which the supervisor collects."""

import sys


def say(text: str) -> None:
    """Writes a line; control characters are shown, not obeyed."""
    clean = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    sys.stderr.write(f"hatchway-launcher: {clean}\n")
    sys.stderr.flush()
