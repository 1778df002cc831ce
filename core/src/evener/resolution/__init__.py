"""Resolution: before the first step every op, state slot and linear weight of a model gets its provider or layout.

===============  ===================================================================================
module           holds, in reading order
===============  ===================================================================================
``buckets``      ranges of token counts that share one function of a call site
``candidates``   ``Candidates``: what there is to choose from, and why a kernel may not serve a call
``resolver``     ``Resolver``: chooses
``footprint``    memory that a step needs
``manifest``     the record of the choices
``attribution``  which package raised an error
===============  ===================================================================================
"""
