"""How many prompt tokens a step of a server takes, so that answers of other requests go on at an even pace. Torch-free.

==========  =========================================================================
module      what it holds
==========  =========================================================================
``costs``   what a step costs, learnt from the steps before
``limit``   the limit on a step's tokens that follows from it
==========  =========================================================================
"""
