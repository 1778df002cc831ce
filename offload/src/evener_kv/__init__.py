"""State that leaves the device's prefix cache stays in host memory (``infer.kv_host_memory``), and comes back when a
request begins with the same tokens. Nothing of it is computed again.

====================  ======================================================================================
module                holds
====================  ======================================================================================
``host``              the connector: where its two halves are made
``host_blocks``       the controller's half: which blocks are where, and which requests wait for blocks
``host_memory``       the workers' half: host memory, and copies to and from it beside the steps
``block_bytes``       blocks of a group as rows of bytes, whatever their layout
``files``             a tier behind host memory: files, which outlive the server
``transfer``          blocks of other servers
``counted``           the counts of several parts as one mapping
``shared``            both together: blocks of other servers beside host memory
====================  ======================================================================================

Two designs were read before this one was made: vLLM's connectors (a request waits in a state of its own while its
blocks are loaded) and SGLang's HiCache (blocks are written when they leave the device, and the host evicts the least
recently used).
"""
