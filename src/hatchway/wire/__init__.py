"""Messages between our own processes, and the protocols that carry them.

The guest-channel codec (`channel`, `channel_fields`), the messages of the node (`node`, with `sessions` and `usage`) and of the
launcher (`launcher`), the RPC framing between control and node (`rpc`), data-plane tokens (`tokens`), Unix sockets at paths of any length (`paths`),
small files that processes leave for each other (`small_files`, `supervision`), and what every process counts (`metrics`) and writes into
its log lines (`tracing`). May
import `domain` only; every process of ours imports from here.
"""
