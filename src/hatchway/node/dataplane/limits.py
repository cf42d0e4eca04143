"""Bounds of the data plane."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlaneLimits:
    """Reaching one gives a problem document that names it."""

    requests: int = 4_096
    """Requests in flight, open streams included."""
    connections: int = 8_192
    """Open connections; beyond it even the problem document is the HTTP server's plain 503."""
    body: int = 65_536
    """Octets of a JSON body."""
    event_octets: int = 96 * 1024
    """Output octets that one event carries at most."""
    write_octets: int = 256 * 1024
    """Encoded octets that are handed to the HTTP server at once."""
    raw_octets: int = 256 * 1024
    """Octets of a raw stream that are read at once."""
    terminal_octets: int = 64 * 1024
    """Output octets of one message of a terminal."""
    stdin_ahead: int = 1024 * 1024
    """Octets of a stdin request that are taken from its client before the process took those before."""
    terminal_ahead: int = 256 * 1024
    """Octets of a terminal's input that are taken before the process took those before."""
    stdin_turn_s: float = 120.0
    """How long a stdin request waits for another one of the same session; longer than clients wait before they repeat one."""
    port_connections: int = 4_096
    """Connections to ports in guests."""
    port_connections_per_sandbox: int = 192
    """Those to one sandbox; below what a link carries, so that its files can be reached besides."""
    port_dial_s: float = 15.0
    """How long a connection to a port may take."""
    port_answer_s: float = 600.0
    """How long a port may take to begin its answer to a request."""
    port_idle_s: float = 75.0
    """How long a client's connection is kept for its next request."""
    port_spare_s: float = 10.0
    """How long a connection to a port is kept for the next request of the same client."""
    client_rate: int = 1_024
    """Octets a second that a client has to take of an answer with files or archives, or to give of such a body."""
    client_grace_s: float = 300.0
    """How long it may stand still in all, or be slower than that, before it is cut off."""
    ping_s: float = 15.0
