"""First contact: what a person with the hardware runs, once, and the evidence that comes of it. Torch-free.

====================  ===============================================================================
module                holds
====================  ===============================================================================
``command``           ``evener first-contact``: runs the parts and writes the evidence file
``run``               all parts, and the evidence that comes of them
``journal``           what a run has found so far, so that an interrupted one can continue
``evidence_command``  ``evener evidence``: checks an evidence file and adds it to a folder of results
``evidence_file``     the content of an evidence file, read and written within limits
``parts``             the parts, in the order in which one depends on another
``supervisor``        one part in a process of its own, with time limits
``child``             that process
``parallel``          each check in a process of its own, several at a time
``private_data``      removes paths, names of users and machines, and addresses from texts
``wheel``             the hash of an installed distribution, or of its wheel
``levels``            the level of evidence of a backend, from records of results
====================  ===============================================================================
"""
