"""Structured output inside the engine: grammars are compiled beside the steps, and each step gets masks of token ids.

==============  ====================================================================
module          what it holds
==============  ====================================================================
``compiler``    compiles grammars in a thread, and keeps those that were used last
``grammars``    what the scheduler and the controller ask
``masks``       a matcher for each slot, and the masks of each plan
``library``     finds the installed grammar library
==============  ====================================================================
"""
