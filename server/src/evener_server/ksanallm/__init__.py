"""KsanaLLM's API: ``/generate`` and ``/forward``, in JSON and in msgpack.

===============  ==================================================================
module           content
===============  ==================================================================
``body``         the fields of both
``encoding``     how answers and errors are written
``prompt``       ids, with embeddings in place of some
``positions``    which of a prompt's tokens a target names
``generate``     texts
``forward``      hidden states, logits and probabilities of a prompt's tokens
``plugin_file``  ``ksana_plugin.py`` of a model's folder, as a request plugin
===============  ==================================================================
"""
