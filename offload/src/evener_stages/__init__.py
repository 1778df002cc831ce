"""Pipeline stages on unlike devices (``infer.stages``). Without it, core has stages on devices of one backend.

===============  ================================================================================
module           holds
===============  ================================================================================
``automatic``    the devices of ``infer.stages=auto``; torch-free
``devices``      the backend, the device and the options of each stage; torch-free
``host_groups``  the groups of stages, which send tensors of every device through host memory
``assembly``     what stages agree on before they load weights, and how their layers are divided
===============  ================================================================================
"""
