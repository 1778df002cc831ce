"""Quantized state: keys and values in eight bits, with a scale for each head of each layer.

==================  ===============================================================================
module              holds
==================  ===============================================================================
``elements``        what the elements mean; pages of them in plain torch
``scales``          the scales of a model, and which of them a rank's heads get
``scale_file``      reading and writing ``kv_cache_scales.json``
``stored_scales``   what a checkpoint says about its KV cache, and the scales that it stores
``choice``          which element type a run's state has
==================  ===============================================================================
"""
