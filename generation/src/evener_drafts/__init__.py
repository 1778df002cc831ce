"""Speculative decoding: the drafter of a run, and what computes drafts in the worker beside the model.

==============  ============================================================================
module          what it holds
==============  ============================================================================
``opening``     the drafter that the configuration names, and who gets drafts
``folder``      what the folder of ``infer.draft_model`` holds, and the drafter for that
``model``       a draft model: what it computes in each plan
``computed``    which tokens have its state
``rest``        when what follows each token rests
``draft``       what was declared beside the model
``declared``    it before weights are read: what it may be, and its layers
``chain``       a layer that reads the model's hidden states: when it runs
``eagle``       a head of EAGLE-3 as such a layer
``eagle_head``  its layer, and how its config and its weights are read
``prediction``  the model's own layer for multi-token prediction as one
==============  ============================================================================
"""
