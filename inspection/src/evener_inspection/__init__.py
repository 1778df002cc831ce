"""Commands that show what a run of a model would use on this machine, and why. They start no engine. Torch-free.

====================  ==================================================================================
module                holds
====================  ==================================================================================
``explain_command``   ``evener explain``: the kernel of each op, and the memory plan
``why_not_command``   ``evener why-not``: why something that is installed was or wasn't used
``config_command``    ``evener config``: the resolved value of every key
``models_command``    ``evener models``: the supported architectures
``explanation``       what ``explain`` shows, as plain data
``explanation_text``  the same as text for a terminal
====================  ==================================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="inspection",
    summary="Commands that show what a run would use, and why: explain, why-not, config, models.",
    contracts={"descriptor": 1},
    commands={
        "explain": "evener_inspection.explain_command:main", "why-not": "evener_inspection.why_not_command:main",
        "config": "evener_inspection.config_command:main", "models": "evener_inspection.models_command:main",
    },
)  # fmt: skip
