"""Ready-made parts for authors of backends. The rest of the core hardly needs them.

======================  ================================================================
module                  holds
======================  ================================================================
``torch_device``        ``TorchDevice``: a device that torch has a namespace for
``torch_communicator``  ``TorchCommunicator``: a group of ranks over ``torch.distributed``
``torch_marks``         what ``torch/version.py`` says, without importing torch
``native_code``         compiling C++ kernels on first use, cached by content
======================  ================================================================
"""
