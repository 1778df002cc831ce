"""The controller: which request computes which tokens in a step, and which blocks of state it gets.

==============  ===========================================================
module          holds, in reading order
==============  ===========================================================
``scheduler``   continuous batching: makes the plan of each step
``request``     a request, its part of a plan, and its part of the result
``state``       block tables of requests, and the prefix cache
``blocks``      the pool: which blocks are free, held, or cached
``forks``       requests that start from another request's state
``media``       which media a step encodes, and which the worker keeps
``grammars``    masks of requests with a grammar: asks an installed package
``drafts``      speculative decoding: asks an installed package
``deadlines``   time limits of requests
``controller``  messages in, plans out, results in, events out
==============  ===========================================================
"""
