"""What an attempt knows, and what it tells: one process makes one attempt."""

from typing import Any

facts: dict[str, Any] = {}
"""About the ground, from the suite."""
tried: list[str] = []
"""What was tried. An attempt that tried nothing is none."""
said: list[str] = []
"""What was read that may not be readable here."""
held: list[str] = []
"""For what the attempt waits just now."""
