"""Records as events of the Open Cybersecurity Schema Framework (OCSF) 1.3, for systems that collect those. Pure.

The record itself is in `raw_data`, octet for octet: what is checked is that. Sources: the classes and enumerations of schema.ocsf.io, version 1.3.0.
"""

from typing import Any, NamedTuple

from hatchway.audit.lines import Record

VERSION = "1.3.0"
SUCCESS, FAILURE = 1, 2
ALLOWED, DENIED = 1, 2
INFORMATIONAL, LOW, HIGH = 1, 2, 4


class _Class(NamedTuple):
    uid: int
    category: int
    activities: dict[str, int]
    """By the last word of the kind; others are 99."""


_FILE = _Class(1001, 1, {"written": 3, "created": 1, "read": 2, "removed": 4, "moved": 5})
_ACCOUNT = _Class(3001, 3, {"created": 1, "revoked": 5, "rotated": 3})
_AUTHENTICATION = _Class(3002, 3, {"refused": 1})
_NETWORK = _Class(4001, 4, {"connection": 6, "frames": 6})
_HTTP = _Class(4002, 4, {})
_DNS = _Class(4003, 4, {"dns": 6})
_API = _Class(6003, 6, {"created": 1, "read": 2, "updated": 3, "changed": 3, "deleted": 4, "accepted": 1})
_BASE = _Class(0, 0, {})
_METHODS = {"CONNECT": 1, "DELETE": 2, "GET": 3, "HEAD": 4, "OPTIONS": 5, "POST": 6, "PUT": 7, "TRACE": 8}
_EXACT = {"key.refused": _AUTHENTICATION, "egress.request": _HTTP, "egress.dns": _DNS}
_AREAS = {"egress": _NETWORK, "files": _FILE, "key": _ACCOUNT, "journal": _BASE}


def event(record: Record, line: str) -> dict[str, Any]:
    """The record as an event; `line` is the record as it lies in the journal."""
    area, _, what = record.kind.partition(".")
    kind = _EXACT.get(record.kind) or _AREAS.get(area, _API)
    activity = kind.activities.get(what, 99)
    if kind is _HTTP:
        activity = _METHODS.get(str(record.data.get("method", "")).upper(), 99)
    denied, failed = record.decision == "denied", record.decision in ("denied", "failed")
    broken = record.kind in ("journal.repaired", "journal.refused", "journal.gap")
    made: dict[str, Any] = {
        "activity_id": activity,
        "category_uid": kind.category,
        "class_uid": kind.uid,
        "type_uid": kind.uid * 100 + activity,
        "severity_id": HIGH if broken else LOW if failed else INFORMATIONAL,
        "time": round(record.time * 1000),
        "count": record.count,
        "status_id": FAILURE if failed else SUCCESS,
        "message": record.kind + (f": {record.reason}" if record.reason else ""),
        "metadata": {
            "version": VERSION,
            "product": {"name": "Hatchway", "vendor_name": "Hatchway"},
            "log_name": "audit",
            "uid": record.hash,
            "sequence": record.sequence,
            "logged_time": round(record.recorded * 1000),
            "tenant_uid": record.project,
            "correlation_uid": record.request_id,
        },
        "actor": {"user": {"uid": record.actor}},
        "raw_data": line,
        "unmapped": {"project": record.project, "sandbox_id": record.sandbox_id, **_shown(record)},
    }
    if activity == 99:
        made["activity_name"] = what or record.kind
    if record.reason:
        made["status_code"] = record.reason
    if record.decision in ("allowed", "denied"):
        made["action_id"] = DENIED if denied else ALLOWED
    if record.count > 1:
        made["start_time"] = round(record.time * 1000)
        made["end_time"] = round(float(record.data.get("last", record.time)) * 1000)
    made.update(_details(kind, record))
    return made


def _shown(record: Record) -> dict[str, Any]:
    return {"data": record.data} if record.data else {}


def _details(kind: _Class, record: Record) -> dict[str, Any]:
    """What the class has besides what all have."""
    data = record.data
    host, port = data.get("host"), data.get("port")
    endpoint = {"hostname": host, "port": port, "ip": data.get("address")}
    target = {name: value for name, value in endpoint.items() if value not in (None, "")}
    if kind is _HTTP:
        url = {"hostname": host, "port": port, "path": data.get("path")}
        request = {
            "http_method": data.get("method"),
            "url": {name: one for name, one in url.items() if one is not None},
        }
        return {"http_request": request, "dst_endpoint": target, "src_endpoint": {"uid": record.sandbox_id}}
    if kind is _DNS:
        return {"query": {"hostname": host or data.get("name")}, "src_endpoint": {"uid": record.sandbox_id}}
    if kind is _NETWORK:
        return {"dst_endpoint": target, "src_endpoint": {"uid": record.sandbox_id}}
    if kind is _FILE:
        path = str(data.get("path", ""))
        return {
            "file": {"path": path, "name": path.rpartition("/")[2], "type_id": 0},
            "device": {"uid": record.sandbox_id, "type_id": 6},
        }
    if kind is _ACCOUNT:
        return {"user": {"uid": str(data.get("subject", record.actor))}}
    if kind is _AUTHENTICATION:
        return {"user": {"uid": record.actor}, "src_endpoint": {"ip": data.get("peer")}}
    if kind is _API:
        api = {"operation": record.kind, "request": {"uid": record.request_id}}
        return {"api": api, "src_endpoint": {"uid": record.sandbox_id or record.project}}
    return {}
