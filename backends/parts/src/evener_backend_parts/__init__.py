"""Parts that several backends share. Not a backend: it registers nothing.

===================  ======================================================================
module               holds
===================  ======================================================================
``forks``            the probe of a vendor whose build of torch uses the namespace ``cuda``
``gpu``              a device of that namespace, its graphs and its communicator
``graphs``           captures of steps by a graph class like torch's
``library``          optional kernel libraries
``paged_library``    attention by such a library, over canonical pages
``flash_attention``  the same with the interface of flash-attn
``by_request``       attention in plain torch over a vendor's own layout
``vendor_ops``       a vendor's custom ops, checked against their published schemas
``vllm_ops``         kernels over custom ops that keep vLLM's names
===================  ======================================================================
"""
