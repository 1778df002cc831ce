"""Vectors and scores of whole texts, from models that generate no tokens; rows of numbers a token, from models that do.

============  ===================================================================
module        what it holds
============  ===================================================================
``settings``  asking a package what a model makes of a text
``limits``    room for whole texts in a step, for encoders
``outputs``   hidden states and logits of a step's tokens, on the device; needs torch
``pooler``    the rows of a text's tokens, pooled on the device; needs torch
``rows``      hidden states, logits, all log-probabilities: checks and reading
``vectors``   the vector of a text, for the caller
============  ===================================================================
"""
