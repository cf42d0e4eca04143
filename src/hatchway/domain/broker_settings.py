"""What an installation says of its broker: the table `[broker]` of hatchway.toml. docs/credentials.md explains it."""

from typing import Annotated

import msgspec
from msgspec import Meta

File = Annotated[str, Meta(min_length=1, max_length=4096)]
"""A path, from the settings file's folder on."""
Project = Annotated[str, Meta(pattern=r"^(\*|[a-z0-9][a-z0-9-]{0,62})$")]
Variable = Annotated[str, Meta(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")]
FileName = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}$")]
ServerName = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9._-]{0,63}$")]
Hosts = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=255)], ...], Meta(min_length=1, max_length=64)]


class Lent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """To which projects a variable or a file is lent (`*`: all), and to which hosts it may be sent."""

    projects: Annotated[tuple[Project, ...], Meta(min_length=1, max_length=1000)]
    hosts: Hosts


class Vault(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A HashiCorp Vault: where it is, how to log in, and which beginnings of `MOUNT/PATH` each project (or `*`) may read."""

    address: Annotated[str, Meta(pattern=r"^https?://[^\s]+$", max_length=512)]
    hosts: Hosts
    paths: Annotated[dict[Project, Annotated[tuple[str, ...], Meta(min_length=1, max_length=256)]], Meta(min_length=1)]
    namespace: Annotated[str, Meta(max_length=256)] = ""
    token_file: File | None = None
    role_id_file: File | None = None
    secret_id_file: File | None = None
    auth_mount: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")] = "approle"
    ca_file: File | None = None
    refresh_s: Annotated[float, Meta(ge=1, le=86400)] = 300.0
    within_s: Annotated[float, Meta(ge=1, le=20)] = 10.0


class BrokerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """See the module."""

    master_key_file: File | None = None
    master_key_variable: Variable | None = None
    variables: Annotated[dict[Variable, Lent], Meta(max_length=1000)] = msgspec.field(default_factory=dict)
    files: Annotated[dict[FileName, Lent], Meta(max_length=1000)] = msgspec.field(default_factory=dict)
    vaults: Annotated[dict[ServerName, Vault], Meta(max_length=64)] = msgspec.field(default_factory=dict)

    @property
    def taken(self) -> tuple[str, ...]:
        """The environment variables that are the broker's alone."""
        key = () if self.master_key_variable is None else (self.master_key_variable,)
        return (*key, *self.variables)


DEFAULT = BrokerSettings()
