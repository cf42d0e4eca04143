"""The OpenAPI 3.1 document, made from the same endpoints that are served and the same types that check and render."""

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from hatchway import __version__
from hatchway.control.endpoints import Endpoint, NoBody
from hatchway.control.views import Problem
from hatchway.domain.problems import MEDIA_TYPE, TITLES

REF = "#/components/schemas/{name}"
_NAME = re.compile(r"\{([a-z_]+)\}")

_ALWAYS = (500,)
_AUTHENTICATED = (401, 403)
_WITH_QUERY = (400, 422)
_WITH_BODY = (400, 413, 415, 422)


def document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """Builds the document."""
    endpoints = tuple(endpoints)
    kinds: list[type[msgspec.Struct]] = [Problem]
    for endpoint in endpoints:
        kinds += [kind for kind in endpoint.answers.values() if kind is not None]
        if endpoint.body is not None and endpoint.body is not NoBody:
            kinds.append(endpoint.body)
    queries = list(dict.fromkeys(endpoint.query for endpoint in endpoints))
    _, schemas = msgspec.json.schema_components([*dict.fromkeys(kinds), *queries], ref_template=REF)
    schemas["Problem"]["additionalProperties"] = True
    parameters = {query: schemas.pop(query.__name__)["properties"] for query in queries}
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        paths.setdefault(endpoint.path, {})[endpoint.method.lower()] = _operation(endpoint, parameters[endpoint.query])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Hatchway",
            "version": __version__,
            "description": "Runs code in isolated microVMs. Errors are problem documents (RFC 9457) with a stable `code`, "
            "a `cause` and a `remedy`. Times are Unix seconds.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "security": [{"key": []}],
        "tags": [{"name": tag} for tag in dict.fromkeys(endpoint.tag for endpoint in endpoints)],
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "bearerFormat": "hw_…", "description": "An API key."}
            },
            "responses": {
                f"Problem{status}": {
                    "description": title,
                    "content": {MEDIA_TYPE: {"schema": {"$ref": REF.format(name="Problem")}}},
                }
                for status, title in TITLES.items()
            },
        },
    }


def _operation(endpoint: Endpoint, query: dict[str, Any]) -> dict[str, Any]:
    errors: set[int] = {*_ALWAYS, 429, *endpoint.errors, *_WITH_QUERY}
    if endpoint.scope is not None:
        errors.update(_AUTHENTICATED)
    if endpoint.body is not None:
        errors.update(_WITH_BODY)
    if endpoint.scope == "write" or endpoint.method == "POST":
        errors.update((503, 507))
    answers: dict[str, Any] = {}
    for status, kind in endpoint.answers.items():
        shown: dict[str, Any] = {"description": _first_line(kind) if kind is not None else "Done."}
        if kind is not None:
            media = "text/event-stream" if endpoint.stream else "application/json"
            shown["content"] = {media: {"schema": {"$ref": REF.format(name=kind.__name__)}}}
        headers = _answer_headers(endpoint)
        if headers:
            shown["headers"] = headers
        answers[str(status)] = shown
    for status in sorted(errors):
        answers[str(status)] = {"$ref": f"#/components/responses/Problem{status}"}
    made: dict[str, Any] = {
        "operationId": _operation_id(endpoint),
        "summary": endpoint.summary,
        "tags": [endpoint.tag],
        "parameters": _parameters(endpoint, query),
        "responses": answers,
    }
    if endpoint.description:
        made["description"] = endpoint.description
    if endpoint.scope is None:
        made["security"] = []
    if endpoint.body is NoBody:
        made["requestBody"] = {
            "required": False,
            "content": {"application/json": {"schema": {"type": "object", "additionalProperties": False}}},
        }
    elif endpoint.body is not None:
        schema = {"$ref": REF.format(name=endpoint.body.__name__)}
        made["requestBody"] = {
            "required": not issubclass(endpoint.body, NoBody),
            "content": {"application/json": {"schema": schema}},
        }
    return made


def _parameters(endpoint: Endpoint, query: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in _NAME.findall(endpoint.path)
    ]
    for name, one in query.items():
        found.append({"name": name, "in": "query", "required": False, "schema": one})
    for prefix in endpoint.query_prefixes:
        found.append(
            {
                "name": prefix.rstrip("."),
                "in": "query",
                "required": False,
                "style": "form",
                "explode": True,
                "description": f"Parameters named `{prefix}KEY`: the value that KEY must have.",
                "schema": {"type": "object", "additionalProperties": {"type": "string"}},
            }
        )
    headers = dict(endpoint.headers)
    if endpoint.idempotent:
        headers["Idempotency-Key"] = (
            "Makes a repetition safe for 24 hours: it does nothing again and names the same things. "
            "The same key with another request is refused (422)."
        )
    if endpoint.waits:
        headers["Prefer"] = (
            "`wait=N` (RFC 7240): answer when the operation has ended, after N seconds at the latest, at most 60."
        )
    found += [
        {"name": name, "in": "header", "required": False, "description": text, "schema": {"type": "string"}}
        for name, text in headers.items()
    ]
    return found


def _answer_headers(endpoint: Endpoint) -> dict[str, Any]:
    text = {"schema": {"type": "string"}}
    headers: dict[str, Any] = {}
    if endpoint.waits:
        headers["Preference-Applied"] = {"description": "What of `Prefer` was followed.", **text}
        if endpoint.method != "GET":
            headers["Location"] = {"description": "The operation.", **text}
    if endpoint.idempotent:
        headers["Idempotency-Replayed"] = {"description": "`true` for a repetition.", **text}
    return headers


def _operation_id(endpoint: Endpoint) -> str:
    words = [word for word in re.split(r"[/{}]+", endpoint.path.removeprefix("/v1")) if word]
    by = "_by_" if "{" in endpoint.path else ""
    names = "_".join(word for word in words if f"{{{word}}}" not in endpoint.path)
    return f"{endpoint.method.lower()}_{names}" + (by + "_".join(_NAME.findall(endpoint.path)) if by else "")


def _first_line(kind: type[Any]) -> str:
    return (kind.__doc__ or "").strip().split("\n")[0]
