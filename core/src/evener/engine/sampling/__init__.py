"""From logits to a step's result, and the tables that both segments of a step read and write.

=================  ==========================================================================
module             what it holds
=================  ==========================================================================
``device_tables``  token ids, block tables and sampling parameters on the device
``sampler``        logits to ids, and log-probabilities
``masks``          the masks of a step as one array
``pending``        a submitted step, whose result is on its way, and one that waits for masks
=================  ==========================================================================
"""
