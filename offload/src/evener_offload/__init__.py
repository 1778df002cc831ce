"""Models of experts that are larger than the accelerator: the host computes the experts of some layers. Torch-free.

=================  ==============================================================
module             holds
=================  ==============================================================
``layers``         which layers' experts go to the host
``host_backend``   the host's backend beside the device's: its kernels and packings
``host_experts``   the experts on the host, and the copies to and from them
=================  ==============================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="offload",
    summary="The host computes the experts of some layers, so that a model larger than the accelerator runs.",
    contracts={"descriptor": 1, "experts": 1},
    placements={"host": "evener_offload.host_experts:HostExperts"},
)
