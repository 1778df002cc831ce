"""The worker: one device rank. It builds the model, plans its memory and runs steps.

===================  =====================================================================
module               holds, in reading order
===================  =====================================================================
``worker``           ``Worker``: the start of a rank from beginning to end, then its steps
``assembly``         choosing backend and kernels, declaring and resolving the model
``geometry``         which layers share a block table, and how the pool is cut into blocks
``weights``          filling the weights and tables of a rank's part of the model
``memory``           the memory plan: estimated, then corrected by a warm-up
``runner``           one plan in, one step on the device
``last_rows``        the last layer for the rows that a step samples from
``graphs``           decode steps that are captured once and replayed
``stages``           what ranks of different pipeline stages send each other
``inline_executor``  the executor of a worker in the controller's own thread
===================  =====================================================================
"""
