"""How the E2B wrapper asks the control plane on behalf of a sandbox: requests of API v1 over a socket that it alone can reach.

Who talks to a sandbox in E2B's way has no key of ours, only the sandbox's own token, which the wrapper checks. What it then needs it asks
for in the sandbox's name: `HEADER` holds the sandbox's id, and there is no `Authorization`. With one, the socket answers as the API does
anywhere.

With `ALL` for the id it asks for one thing: the states of all sandboxes that it may speak for, as they change (`GET /v1/events`). So it hears
at once that one stopped running while streams of it are open.
"""

SOCKET = "e2b-control.sock"
"""In the run folder. The control plane listens, the wrapper's user connects."""
HEADER = "hatchway-on-behalf-of"
ALL = "*"
"""In place of a sandbox's id: all that the wrapper may speak for."""
ANNOTATION = "e2b"
"""The entry of a sandbox's annotations that is the wrapper's: only sandboxes that have it are ever spoken for."""
KEY_ID = "e2b"
"""What the audit journal and the logs name as the key of such requests."""
