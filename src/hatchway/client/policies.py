"""What may leave sandboxes, for blocking code: `Hatchway.policies`. `apolicies` has the same for asyncio."""

from collections.abc import Iterator, Mapping
from typing import Any

from . import calls, policycalls
from .models import EffectivePolicy, Policy
from .records import all_of
from .transport import SyncDriver


class Policies:
    """Policies by name. Those of the tiers `project` and `template` need a key with the scope `admin`, of `platform` one with `installation`."""

    def __init__(self, driver: SyncDriver) -> None:
        self._driver = driver

    def put(
        self,
        name: str,
        document: str | Mapping[str, object],
        *,
        tier: str = "sandbox",
        template: str | None = None,
        if_match: str | None = None,
        only_new: bool = False,
    ) -> Policy:
        """Makes a policy, or changes it; `document` is text (YAML or JSON) or an object. It holds for running sandboxes within a second.

        `if_match` is the `etag` of the version that is to be changed. Raises `Unprocessable` (`invalid_policy`, whose `problems` say what is
        wrong) with everything as before, `Conflict` (`policy_changed policy_exists policy_tier`).
        """
        given = document if isinstance(document, str) else dict(document)
        return self._driver.run(
            policycalls.put_policy(name, given, tier=tier, template=template, if_match=if_match, only_new=only_new)
        )

    def get(self, name: str, *, tier: str | None = None) -> Policy:
        """Returns a policy with its document; `tier="platform"` for one of the installation. Raises `NotFound`."""
        return self._driver.run(policycalls.get_policy(name, tier))

    def list(self, *, tier: str | None = None) -> Iterator[Policy]:
        """Iterates over the policies that hold for the project's sandboxes, the highest tier first, without their documents."""
        return all_of(self._driver, policycalls.policies(tier))

    def delete(self, name: str, *, tier: str | None = None, if_match: str | None = None) -> None:
        """Deletes a policy: what it allowed is not allowed any more. Raises `Conflict` (`policy_in_use policy_changed`)."""
        self._driver.run(policycalls.delete_policy(name, tier, if_match))

    def of_sandbox(self, sandbox_id: str) -> EffectivePolicy:
        """Returns all that decides what leaves a sandbox, and how far it holds."""
        return self._driver.run(policycalls.effective_policy(sandbox_id))

    def check(
        self,
        sandbox_id: str,
        host: str,
        *,
        port: int = 443,
        method: str | None = None,
        path: str = "/",
        headers: Mapping[str, str] | None = None,
        websocket: bool = False,
        tls: bool | None = None,
        document: str | Mapping[str, object] | None = None,
    ) -> dict[str, Any]:
        """Tells whether this would pass out of a sandbox: `action reason explanation rule stages credentials needed`.

        Without `method` only the connection is asked about. `document` is asked instead of what the sandbox has of its own tier.
        """
        body = calls.compact(
            sandbox=sandbox_id,
            host=host,
            port=port,
            method=method,
            path=path,
            headers=None if headers is None else dict(headers),
            websocket=websocket,
            tls=tls,
            document=document if document is None or isinstance(document, str) else dict(document),
        )
        return self._driver.run(policycalls.check_policy(body))
