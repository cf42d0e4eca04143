"""Where the package installers of this machine read from, as their own configuration says: `hatchway policy init`.

One module for each tool (`pip` with uv, `npm`, `apt`, `cargo`, `go`) reads its files and environment as the tool does, and asks the
tool itself for its default where nothing is configured: no name of a host stands here. `machine` is what they may look at; `profile`
makes rules of what they found: reading alone, the paths of the index alone, no secrets. Called by `policy_files`; imports the domain.
"""

import os
from pathlib import Path

from . import apt, cargo, go, npm, pip
from .machine import Machine
from .profile import Profile, profile

TOOLS = (pip, npm, apt, cargo, go)


def profile_of(machine: Machine) -> Profile:
    """The policy for the installers of a machine."""
    return profile(machine, [tool.found(machine) for tool in TOOLS])


def profile_of_this_machine(project: Path | None) -> Profile:
    """The policy for the installers here. `project`: a folder whose own configuration counts as well."""
    return profile_of(Machine(environment=dict(os.environ), project=project))
