"""How an approval is shown: by the API, and to the webhook."""

from typing import Any

import msgspec

from hatchway.control import views
from hatchway.storage.approvals import ApprovalRow


class Approval(views.View, frozen=True, kw_only=True):
    """A request for consent. `kind`: `egress` (`request` has `rule host port protocol method path reason`) or `operation` (`request` has `verb` and its arguments).

    `state`: `pending allowed denied ended`; `why` says how it ended without an answer. `key` is what an answer for longer than once holds for.
    `delivered`: whether who asked has the answer.
    """

    id: str
    kind: str
    state: str
    sandbox_id: str
    operation: str | None
    key: str
    request: dict[str, Any]
    scope: str | None
    ttl_s: float | None
    note: str
    approver: str | None
    delivered: bool
    why: str | None
    created_at: float
    expires_at: float
    answered_at: float | None


def show(row: ApprovalRow) -> Approval:
    """An approval as it is shown."""
    fields = msgspec.structs.asdict(row)
    shown = {name: fields[name] for name in Approval.__struct_fields__ if name in fields}
    return Approval(**shown, operation=row.operation_id)
