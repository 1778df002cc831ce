"""The KV cache in eight bits: which elements a run stores, and with which scales.

=================  ==================================================================
module             holds
=================  ==================================================================
``choice``         the decision for a run (``Descriptor.state_formats``)
``scales``         the scales of a model, and which of them a rank's heads get
``scale_file``     reading and writing ``kv_cache_scales.json``
``stored_scales``  what a checkpoint says about its KV cache, and scales that it stores
=================  ==================================================================
"""
