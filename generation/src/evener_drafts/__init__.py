"""What finds proposed tokens in the worker, beside the model that checks them.

============  ==========================================================================
module        what it holds
============  ==========================================================================
``model``     the draft model of ``infer.draft_model``: what it computes in each plan
``declared``  the draft model before weights are read: what it may be, and its layers
============  ==========================================================================
"""
