"""Projects, and the tokens of sandboxes, for asyncio: `AsyncHatchway.projects`, `AsyncHatchway.tokens`. `tenancy` has the same for blocking code."""

from collections.abc import AsyncIterator, Mapping, Sequence

from . import tenancycalls
from .arecords import all_of
from .atransport import AsyncDriver
from .models import Project, Token


class AsyncProjects:
    """What keys and objects belong to. Making, bounding and deleting them needs a key with the scope `installation`."""

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    async def create(
        self,
        name: str,
        *,
        require_isolation: str | None = None,
        templates: Sequence[str] | None = None,
        quotas: Mapping[str, int] | None = None,
        caps: Mapping[str, float] | None = None,
        approvals: Sequence[str] | None = None,
    ) -> Project:
        """Makes a project. What is not given is not bounded. `approvals`: verbs that wait for somebody's consent (`delete rollback export`).

        Raises `Conflict("project_exists")`.
        """
        body = tenancycalls.settings(require_isolation, templates, quotas, caps, approvals)
        return await self._driver.run(tenancycalls.create_project({"name": name, **body}))

    async def get(self, name: str) -> Project:
        """Looks a project up, with what it holds now (`usage`)."""
        return await self._driver.run(tenancycalls.get_project(name))

    def list(self) -> AsyncIterator[Project]:
        """Iterates over the projects that the key can see."""
        return all_of(self._driver, tenancycalls.projects())

    async def update(
        self,
        name: str,
        *,
        require_isolation: str | None = None,
        templates: Sequence[str] | None = None,
        quotas: Mapping[str, int] | None = None,
        caps: Mapping[str, float] | None = None,
        approvals: Sequence[str] | None = None,
    ) -> Project:
        """Changes what is given; `quotas`, `caps` and `approvals` replace all that was set. What is there goes on, even beyond a new bound."""
        body = tenancycalls.settings(require_isolation, templates, quotas, caps, approvals)
        return await self._driver.run(tenancycalls.change_project(name, body))

    async def delete(self, name: str, *, force: bool = False) -> bool:
        """Deletes a project, with `force` all that it holds, too; its keys end at once. Tells whether it is gone already, else `get` does.

        Raises `Conflict` (`project_not_empty project_is_default`).
        """
        return await self._driver.run(tenancycalls.delete_project(name, force=force))


class AsyncTokens:
    """The tokens of sandboxes: the right to reach one on its node without a key."""

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    def list(self, sandbox_id: str) -> AsyncIterator[Token]:
        """Iterates over those of a sandbox that are good now, without the tokens themselves."""
        return all_of(self._driver, tenancycalls.tokens_of(sandbox_id))

    async def revoke(self, token_id: str) -> None:
        """Revokes one; what was opened with it ends at once."""
        await self._driver.run(tenancycalls.revoke_token(token_id))

    async def revoke_all(self, sandbox_id: str) -> None:
        """Revokes every token of a sandbox, those of its sessions too. New ones can be made at once."""
        await self._driver.run(tenancycalls.revoke_tokens(sandbox_id))
