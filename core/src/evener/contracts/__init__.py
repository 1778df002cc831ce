"""What a package implements to extend evener: one module a contract, each readable alone.

========================  ==========================================================
module                    for whom
========================  ==========================================================
``descriptor``            every package: what it is, before anything is imported
``probe``                 a backend: is my hardware here?
``hooks``                 every package: the functions that evener calls to register it
``device``                a backend: memory, streams, events, read-back
``ops``                   a backend or kernel package: kernels for primitive and composite ops
``state``                 a backend or kernel package: attention units and the state they own
``communicator``          a backend or collective package
``graph``                 a backend or graph package
``quant``                 a quantization scheme, or a kernel that computes in a format
``experts``               whoever places experts
``architecture``          a model author
``request_plugin``        whoever touches requests and responses
========================  ==========================================================

None of these modules imports torch when it is imported.
"""
