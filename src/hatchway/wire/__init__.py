"""Messages between our own processes, and the protocols that carry them.

The guest-channel codec (`channel`), the messages of the node (`node`), of the launcher (`launcher`) and of the shim
(`shim`), the RPC framing between control and node (`rpc`), and data-plane tokens (`tokens`). May import `domain` only;
every process of ours imports from here.
"""
