"""From logits to a step's result.

===========  ==========================================================================
module       what it holds
===========  ==========================================================================
``sampler``  logits to ids, and log-probabilities
``results``  reads the results of steps, beside the next one
``masks``    the masks of a step as one array
``pending``  a submitted step, whose result is on its way, and one that waits for masks
===========  ==========================================================================
"""
