"""The audit journal. One process (`main`, `writer`) appends what all others say (`client`); anybody checks it (`verifying`).

Imports domain and wire alone. The supervisor starts `main`; gateways, broker, node and control plane send by `client`; commands read files with
`verifying` and `ocsf`, which need neither the process nor an installation.
"""
