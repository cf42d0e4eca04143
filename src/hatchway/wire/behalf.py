"""How the E2B wrapper asks the control plane on behalf of a sandbox: requests of API v1 over a socket that it alone can reach.

Who talks to a sandbox in E2B's way has no key of ours, only the sandbox's own token, which the wrapper checks. What it then needs it asks
for in the sandbox's name: `HEADER` holds the sandbox's id, and there is no `Authorization`. With one, the socket answers as the API does
anywhere.
"""

SOCKET = "e2b-control.sock"
"""In the run folder. The control plane listens, the wrapper's user connects."""
HEADER = "hatchway-on-behalf-of"
ANNOTATION = "e2b"
"""The entry of a sandbox's annotations that is the wrapper's: only sandboxes that have it are ever spoken for."""
KEY_ID = "e2b"
"""What the audit journal and the logs name as the key of such requests."""
