"""The size of one step: how many of the requests it computes, and how many tokens.

=====================  =============================================================================
module                 what it holds
=====================  =============================================================================
``micro_batches``      how pipeline stages divide the requests among the plans in flight
``step_limit``         how many tokens a step may have, and which package says it
=====================  =============================================================================
"""
