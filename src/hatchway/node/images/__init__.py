"""Templates: how they are built, named and kept, and the baked snapshots that sandboxes are restored from.

`build` runs as root, in a process of its own, before the node starts; `store` and `bake` run in the unprivileged node,
which can read releases and never write them. May import `domain`, `wire`, the seam of `node.vmm`, and `node.guest`;
called by the node's core, by the set-up and by the supervisor.
"""
