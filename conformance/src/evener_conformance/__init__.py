"""The conformance kit, simulated devices, and small builders for tests. Torch-free.

=======================  ===============================================================================
package or module        holds
=======================  ===============================================================================
``kit``                  the checks of ``evener conformance`` and of the pytest plugin
``command``              ``evener conformance``
``first_contact``        ``evener first-contact`` and ``evener evidence``
``new``                  ``evener new``: writes a package to start from
``core_version``         the check that evener and this package have the same version
``pytest_plugin``        the kit in a vendor's own tests
``simulated``            an accelerator simulated in host memory, with the constraints of hard vendors
``graph``                a device that captures and replays steps
``reference``            a backend, a device and engines on the reference ops
``naive``                a second, simple implementation of models and state, to compare the engine with
``oracle``               comparison of greedy text with an oracle
``fake_torch``           a fake torch package that looks like another vendor's build
``fake_engine``          an engine client without a model, for tests of front ends
``rank_threads``         a controller over ranks that are threads of this process
``mirror_communicator``  a rank that simulates its peers
``distributions``        temporary distributions with entry points
``package_site``         packages in a temporary folder, for tests of plugin discovery
``tiny_tokenizer``       a small tokenizer
=======================  ===============================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="conformance",
    summary="The conformance kit (`evener conformance`) and package templates (`evener new`).",
    contracts={"descriptor": 1},
    commands={
        "conformance": "evener_conformance.command:main",
        "new": "evener_conformance.new:main",
        "first-contact": "evener_conformance.first_contact.command:main",
        "evidence": "evener_conformance.first_contact.evidence_command:main",
    },
)
