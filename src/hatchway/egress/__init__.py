"""The gateway process: all that leaves a sandbox passes here, is named by us, decided by its policy, and dialled by us. Holds no secret.

`main` runs one shard, `gateway` is one sandbox in it, `flows` takes a connection through the stages of a decision; `dns`, `peeking`,
`authority` and `upstream` are what a flow needs, `http/` is the HTTP that an intercepted one speaks. Imports domain and wire, and nothing of
other processes; the supervisor starts it, the node speaks to it by `wire.egress`.
"""
