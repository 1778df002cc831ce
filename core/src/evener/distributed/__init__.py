"""Ranks: how many there are, which one this is, how they find each other, and what they do together.

==================  ================================================================================
module              holds, in reading order
==================  ================================================================================
``world``           a worker's rank among the others, and its ends of its groups
``agreement``       what ranks settle together before they load weights
``contact``         how a worker reaches the controller, and the keys between machines
``communicators``   which communicator is used; graphs that all ranks capture, or none
==================  ================================================================================
"""
