"""State that an ended request leaves for requests that go on from it, as the beams of a search do.

Torch-free.

============  =============================================================
module        holds
============  =============================================================
``mark``      what a request says: which search it is of, and its parent
``search``    one search, for the front end
``kept``      the states, in the controller
``commands``  the command that starts and ends this in the controller
============  =============================================================
"""
