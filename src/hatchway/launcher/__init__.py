"""The one privileged process: prepares slots (network, cgroup, uid), jails VMMs, and ends them; its verbs are `wire.launcher`.

Started by the supervisor as `python -I -m hatchway.launcher`; the node talks to it through `node.vmm.launcher`. May import
`domain`, `wire` and the standard library's small modules only: all that is in this process is root.
"""
