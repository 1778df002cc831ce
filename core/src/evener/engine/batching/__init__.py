"""How much one step takes: its share of the requests, and its tokens.

=====================  =============================================================================
module                 what it holds
=====================  =============================================================================
``micro_batches``      how pipeline stages divide the requests among the plans in flight
``step_limit``         how many tokens a step may have
``timed_executor``     an executor that measures these times
=====================  =============================================================================
"""

from evener.engine.batching.micro_batches import MicroBatches
from evener.engine.batching.step_limit import StepLimit
from evener.engine.batching.timed_executor import TimedExecutor, limit_steps

__all__ = ["MicroBatches", "StepLimit", "TimedExecutor", "limit_steps"]
