"""Links to files that name no sandbox: with one URL for everything, an SDK makes them of that URL, a path and a signature alone.

The signature follows from the sandbox's token, and so tells which of the sandboxes it is that this wrapper made, connected to or served of late.
"""

import hmac
from collections import OrderedDict
from urllib.parse import parse_qs

from hatchway.e2b.identity import Identity
from hatchway.e2b.signatures import Signer, looks_signed

PATH = "/files"
OPERATIONS = {"GET": "read", "HEAD": "read", "POST": "write"}
MAX_KNOWN = 4096
"""Sandboxes that are remembered; trying all of them takes some milliseconds, however long the path is."""


class Links:
    """The sandboxes that links may be for."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, str] = OrderedDict()

    def note(self, sandbox_id: str, identity: Identity) -> None:
        """Somebody has to do with this sandbox."""
        if sandbox_id not in self._tokens:
            self._tokens[sandbox_id] = identity.envd_token(sandbox_id)
        self._tokens.move_to_end(sandbox_id)
        while len(self._tokens) > MAX_KNOWN:
            self._tokens.popitem(last=False)

    def find(self, method: str, path: str, query: bytes) -> str | None:
        """The sandbox that a request is for by its signature alone; None where it is none, or of a sandbox that is not known."""
        if path != PATH or method not in OPERATIONS or b"signature=" not in query:
            return None
        try:
            fields = {name: values[0] for name, values in parse_qs(query.decode("latin-1"), max_num_fields=16).items()}
            expiration = int(fields["signature_expiration"]) if "signature_expiration" in fields else None
        except ValueError:
            return None
        given = fields.get("signature", "")
        if not looks_signed(given):
            return None
        signer = Signer(fields.get("path", ""), OPERATIONS[method], fields.get("username", ""), expiration)
        for sandbox_id, token in reversed(self._tokens.items()):
            if hmac.compare_digest(given.encode(), signer.sign(token).encode()):
                return sandbox_id
        return None
