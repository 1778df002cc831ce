"""Vectors and scores of whole texts, from models that then generate none.

============  ==========================================================================
module        what it holds
============  ==========================================================================
``settings``  what a model makes of a text's tokens: as its folder says, or as was asked
``names``     names of the classes of models without a language model head
``heads``     what such a model computes from its last hidden states
``pooler``    the rows of a text's tokens, pooled on the device
``vectors``   the vector of a text, for the caller
============  ==========================================================================
"""
