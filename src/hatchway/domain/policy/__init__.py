"""The policy language: what may leave a sandbox. Pure: documents in, verdicts out; no sockets, no clock but the one that is given.

Imports nothing of ours but `domain`. The control plane checks documents with it, a gateway decides with it, `hatchway policy`
explains with it: all three by the same code. docs/policy.md is the language's reference.

```
text ──reading.load──▶ Document ──reading.canonical──▶ what is stored and sent ──TieredDocument.stored──┐
                                                                                                       │
            Verdict ◀──Policy.name, connect, request, address──  Policy ◀──compiled.compile_policy─────┘
```
`schema` says what a document may hold, `forms` reads its texts, `checks` what must fit together, `problems` what is wrong.
`names`, `addresses` and `paths` are the canonical forms that guests and policies are compared in; gateways and broker use them too.
"""
