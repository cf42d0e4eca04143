"""What leaves the sandboxes of a node: which shard serves whose gateway, under which policy, and who may use which credential.

`gateways` has all of them and finds each again after any process ended; `gateway` is one sandbox's, which the verbs open, cut and close;
`identity` is what it keeps on disk; `bindings` is what its policy says of credentials; `links` are the connections to shards and broker; `drops` records what network slots dropped.
May import `domain`, `wire` and the room `vmm` (the launcher holds the listeners). Called by the rooms that move sandboxes, and by `main`.
"""
