"""What `hatchway redteam` does: named attacks from within real sandboxes, against a small internet of its own that writes down what arrives.

`attacks` are tables of attacks by class, `guest` is the program that runs them as root of a guest, `ground` makes the internet and
`marks` is the oracle; `runner` does the attempts in sandboxes, `naive` the same ones where nothing is defended. It asks as a client
does, imports the client and the domain, knows no process from within, and is called by the command line and by tests.
"""
