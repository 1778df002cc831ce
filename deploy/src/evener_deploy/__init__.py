"""Several servers behind one address, on engines for distributed programs that exist. Torch-free.

===================  ==================================================================
module               holds
===================  ==================================================================
``command``          ``evener deploy``: starts it, and ends it with a signal
``options``          what the command line says of it
``ray_app``          the application of Ray Serve: the only module that imports Ray
``dynamo_engine``    an engine of Dynamo: the only module that imports it
``dynamo_request``   what Dynamo says of a request, as our parameters
``engine_process``   one ``evener serve`` as a child of a replica
``child``            how that child ends with its parent
``exchange``         a request and its answer between the address and a replica
``retries``          another replica answers if one is lost before its answer began
===================  ==================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="deploy",
    summary="Several servers behind one address, on Ray Serve (`evener deploy`).",
    contracts={"descriptor": 1},
    commands={"deploy": "evener_deploy.command:main"},
)
