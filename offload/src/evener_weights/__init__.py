"""Sleep and wake, and weights that are replaced while the engine runs: commands of the engine, see
``evener.engine.wire.installed``.

============  ==================================================================================
module        holds
============  ==================================================================================
``commands``  where the halves are found
``fronts``    what ``LLM`` and ``AsyncLLM`` do: who may ask when, and the version of the weights
``held``      the controller's half: which weights there are, and how to go back to the earlier ones
``ranks``     the workers' half: weights are checked, released and read on a rank
============  ==================================================================================
"""
