"""What leaves a node as files and comes back from elsewhere: archives of sandboxes and snapshots, and the store of kept memory.

An archive and an object of a store are hostile input: nothing of them is believed before a signature or a digest says who made them, and
everything is bounded by what was said before it is read. Knows `vmm` (captures and disk layers) and `images` (releases); the data
plane and the node's core use it.
"""
