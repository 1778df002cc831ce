"""Structured output in the engine: grammars are compiled beside the steps, and each step gets masks of token ids.

==============  ==================================================================
module          what it holds
==============  ==================================================================
``compiler``    compiles grammars in a thread, and keeps those that were used last
``masks``       a matcher for each slot, and the masks of each plan
``library``     finds the installed grammar library
``no_repeats``  texts in which no sequence of a given length comes twice
==============  ==================================================================
"""
