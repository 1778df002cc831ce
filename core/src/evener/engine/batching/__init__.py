"""The size of one step: how many of the requests it computes, and how many tokens.

=====================  =============================================================================
module                 what it holds
=====================  =============================================================================
``micro_batches``      how pipeline stages divide the requests among the plans in flight
``step_limit``         how many tokens a step may have
``timed_executor``     an executor that measures how long steps take
=====================  =============================================================================
"""

from evener.engine.batching.micro_batches import MicroBatches
from evener.engine.batching.step_limit import StepLimit
from evener.engine.batching.timed_executor import TimedExecutor, limit_steps

__all__ = ["MicroBatches", "StepLimit", "TimedExecutor", "limit_steps"]
