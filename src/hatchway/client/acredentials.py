"""Credentials, for asyncio: `AsyncHatchway.credentials`. `credentials` has the same for blocking code."""

from collections.abc import AsyncIterator, Mapping, Sequence

from . import credentialcalls
from .arecords import all_of
from .atransport import AsyncDriver
from .models import Credential, MasterKey


class AsyncCredentials:
    """Secrets for the requests of sandboxes; no sandbox ever has one. All of it needs a key with the scope `admin`."""

    def __init__(self, driver: AsyncDriver) -> None:
        self._driver = driver

    async def put(
        self,
        name: str,
        hosts: Sequence[str],
        *,
        value: str | None = None,
        variable: str | None = None,
        file: str | None = None,
        vault: Mapping[str, str] | None = None,
    ) -> Credential:
        """Makes a credential or changes one. It is never sent to another host than `hosts`, whatever a policy says.

        Exactly one source is given: the `value` itself, which the broker keeps encrypted; a `variable` or a `file` of the broker, one that
        its configuration lists; or `vault` with `server`, `mount`, `path` and `field`. Raises `Unprocessable` for a value or hosts that
        cannot be used, `Forbidden("not_lent")`, and `Unavailable("broker_unavailable")`.
        """
        body = credentialcalls.credential_body(hosts, value, variable, file, vault)
        return await self._driver.run(credentialcalls.put_credential(name, body))

    async def get(self, name: str, *, check: bool = False) -> Credential:
        """Looks a credential up, without its value; with `check` also whether the value can be had now."""
        return await self._driver.run(credentialcalls.get_credential(name, check=check))

    def list(self) -> AsyncIterator[Credential]:
        """Iterates over the credentials of the project, without their values."""
        return all_of(self._driver, credentialcalls.credentials())

    async def delete(self, name: str) -> None:
        """Forgets a credential; connections that use it are cut."""
        await self._driver.run(credentialcalls.delete_credential(name))

    async def rotate_key(self) -> MasterKey:
        """Makes a new master key and seals all stored values of the installation with it. Needs a key with the scope `installation`.

        Raises `Conflict("master_key_foreign")` where the operator keeps the master key.
        """
        return await self._driver.run(credentialcalls.rotate_master_key())
