"""What a package implements to extend evener. One module per contract; each can be read alone.

========================  ==========================================================
module                    for whom
========================  ==========================================================
``descriptor``            every package: what it is, before anything is imported
``probe``                 a backend: is my hardware here?
``hooks``                 every package: the functions that evener calls to register it
``device``                a backend: memory, streams, events, read-back
``ops``                   a backend or kernel package: kernels for primitive and composite ops
``state``                 a backend or kernel package: attention, and the state (KV cache) that it reads
``communicator``          a backend or collective package: how ranks talk
``graph``                 a backend or graph package: capture and replay of a step
``quant``                 a quantization scheme, or a kernel that computes in a format
``experts``               a kernel that computes a mixture of experts
``architecture``          a model author
``encoder``               a model author: images
``declared``, ``weights``  a kernel author: what a model declares, and the weights of composite ops
``checkpoint``            a reader of another kind of checkpoint file
``request_plugin``        a plugin that changes requests or responses
``media``                 the same: rows that replace embeddings in a prompt
========================  ==========================================================

None of these modules imports torch when it is imported.
"""
