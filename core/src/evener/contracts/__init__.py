"""What a package implements to extend evener. One module per contract; each can be read alone.

=========================  =======================================================================================
module                     for whom
=========================  =======================================================================================
``descriptor``, ``parts``  every package: what it is and has, before anything is imported
``probe``                  a backend: is my hardware here?
``hooks``                  every package: the functions that evener calls to register it
``device``                 a backend: memory, streams, events, read-back
``ops``                    a backend or kernel package: kernels for primitive and composite ops
``statics``                a kernel author: the static parameters of composite ops, with their types
``state``                  a backend or kernel package: attention, and the state (KV cache) that it reads
``interfaces``             the conformance kit: what a provider of each kind of state has to be
``communicator``           a backend or collective package: how ranks talk
``graph``                  a backend or graph package: capture and replay of a step
``quant``                  a quantization scheme, or a kernel that computes in a format
``storage``                the same: how the elements of a weight are stored, and in which tensors
``quantized``              a package that stores state (KV cache) in fewer bits, or decides which
``experts``                a kernel that computes a mixture of experts
``placement``              a package whose backend computes experts beside the device
``architecture``           a model author
``builder``, ``sizes``      the same: what a model declares itself to, and the sizes that a rank has
``pooling``                a model author: models that embed or score a text
``encoder``                a model author: images
``declared``, ``weights``  a kernel author: what a model declares, and the weights of composite ops
``checkpoint``             a reader of another kind of checkpoint file
``conversion``             a view of a checkpoint, which changes how it is read; a quantizer
``tokenizer``              a reader of tokenizer files
``generation``             chat templates, parsers of tool calls and reasoning, drafters
``writing``                a parser: how a model writes the calls that it reads, so that answers can be held to it
``grammar``                a library for structured output
``adapters``               adapters (LoRA): who reads them, and who computes with them
``connector``              a place for blocks that leave the prefix cache: host memory, another server
``request_plugin``         a plugin that changes requests or responses
``outputs``                the same: what a caller gets back
``media``                  a request plugin: rows that replace embeddings in a prompt
=========================  =======================================================================================

Import a name from its module: ``from evener.contracts.weights import AttentionWeights``. None of these modules imports
torch when it is imported.
"""
