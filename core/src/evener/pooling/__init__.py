"""Vectors and scores of whole texts, from models that then generate none.

============  ==========================================================================
module        what it holds
============  ==========================================================================
``settings``  asking a package what a model makes of a text, and what a model can be asked for
``names``     names of the classes of models without a language model head
``pooler``    the rows of a text's tokens, pooled on the device
``vectors``   the vector of a text, for the caller
============  ==========================================================================
"""
