"""Models that make vectors or scores of texts.

===========  ==================================================================
module       what it holds
===========  ==================================================================
``reader``   what the files of a model say that it does, and how
``pairs``    how a tokenizer joins the two texts of a pair
``modules``  the list of modules in folders of sentence-transformers
``heads``    what such a model computes from its last hidden states
===========  ==================================================================
"""
