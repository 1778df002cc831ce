"""The model cache (``model_cache=FOLDER``): the first start leaves each rank's weights in a file, as its kernels read
them, and the next one maps that file instead of converting and packing the model again.

====================  ==================================================================================
module                holds
====================  ==================================================================================
``cached_weights``    fills a rank's weights from its cache file, or loads them and writes one
``chosen``            which weights are worth a place in it, and their tensors
``fingerprint``       what a cache file must agree with: source files, packages, weights
``cache_file``        the file: written whole or not at all, checked before it is read
====================  ==================================================================================

A file holds nothing but tensors and JSON; no code is run from it.
"""
