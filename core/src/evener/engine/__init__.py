"""The engine, in nine packages. Read them in this order.

==============  ===========================================================================================
package         holds
==============  ===========================================================================================
``facts``       what a started worker and a started engine say of themselves
``wire``        what crosses between the parts: messages, plans of steps, interfaces of client and executor
``batching``    how large a step may be
``controller``  the scheduler: which request computes which tokens in each step, and in which blocks
``inputs``      what a step reads: the requests' tables on the device, and a plan as arrays
``worker``      one device rank: builds the model, plans its memory, runs steps and samples
``sampling``    token ids from logits, and results that were not read yet
``quantized``   how state is stored, and its scales
``processes``   starting the parts in one process or in several, with their sockets and heartbeats
==============  ===========================================================================================

``facts`` imports none of the others, ``wire`` only ``facts``, ``controller`` and ``worker`` do not import each other,
and ``processes`` imports all.
"""
