"""Random histories against a whole service, with a model that knows what has to come of them: what `hatchway chaos` does, and the tests.

`model` follows from the lifecycle table, `acts` are verbs that are compared with it, `walk` chooses them at random. It imports the
domain, talks HTTP as a client does, and is called by the command line and by tests.
"""
