"""Media of prompts: rows that replace the embeddings of tokens, given or computed by a model's encoders.

===========  =======================================================================
module       what it holds
===========  =======================================================================
``checks``   what a caller's media must be like; large ones are cut into pieces
``planner``  which media each step stores, encodes and drops, for the controller
``rows``     the rows that a worker keeps between steps; needs torch
===========  =======================================================================
"""
