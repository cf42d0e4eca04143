"""The broker: the one process that has secrets. It keeps them, lends them to the sandboxes that a node names, and speaks with the upstream itself.

```
service   rpc: sources of the control plane, grants of the node          legs      streams of the gateways: who may have one, and its life
sources ← store (sealed files), environment, files, vault               leg ← http1, checking, injecting, scrubbing, upstream
grants    what a sandbox's generation may use, and until when            hardening what the process itself gives up before it has a secret
```
Imports the domain and the wire; nobody imports it but the supervisor, which starts it. `http1`, `checking`, `injecting` and `scrubbing` are
pure. It trusts the control plane for sources and the node for grants, and a gateway for nothing.
"""
