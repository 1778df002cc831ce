"""For looking into a run: commands that show what it would use on this machine, and why; measurements of an engine's
steps, and for a start; and an executor that runs all ranks in one process, for a debugger. Of the commands only
``bench-engine`` and ``tune`` start one. Torch-free.

=======================  ===============================================================================
module                   holds
=======================  ===============================================================================
``explain_command``      ``evener explain``: the kernel of each op, and the memory plan
``why_not_command``      ``evener why-not``: why something that is installed was or wasn't used
``config_command``       ``evener config``: the resolved value of every key
``models_command``       ``evener models``: the supported architectures
``plugins_command``      ``evener plugins``: the installed packages
``bench_command``        ``evener bench-engine``: times of an engine's steps, without a server
``tune_command``         ``evener tune``: times of the kernels that could run each op, in a file
``tuner``                what ``tune`` measures: each candidate beside the reference, in turns
``recorded_ops``         the inputs that a model calls its ops with
``engine_bench``         what ``bench-engine`` measures, as plain data
``step_times``           the times of steps on synthetic prompts
``layer_facts``          the layers of a model by kind, and the bytes that a step reads
``kind_costs``           what one layer of each kind costs, and the whole model would
``explanation``          what ``explain`` shows, as plain data
``absent_ranks``         the communicator of a model that is declared and not run
``explanation_text``     the same as text for a terminal
``dummy_formats``        random numbers of quantized weights
``dummy_weights``        random weights, for ``load=dummy``
``layer_split``          the best division of layers among stages on unlike devices
``layer_costs``          how long each kind of layer takes on each stage, measured
``rank_threads``         the executor whose workers are threads of one process
``thread_communicator``  how these threads communicate
=======================  ===============================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor

descriptor = Descriptor(
    name="inspection",
    summary="Commands that show what a run would use, and why; ranks in one process, for debugging.",
    contracts={"descriptor": 1},
    commands={
        "explain": "evener_inspection.explain_command:main", "why-not": "evener_inspection.why_not_command:main",
        "config": "evener_inspection.config_command:main", "models": "evener_inspection.models_command:main",
        "plugins": "evener_inspection.plugins_command:main", "bench-engine": "evener_inspection.bench_command:main",
        "tune": "evener_inspection.tune_command:main",
    },
    weight_makers={"dummy": "evener_inspection.dummy_weights:load_dummy"},
    stage_parts={"split": "evener_inspection.layer_costs:measured_split"},
    executors={"inline": "evener_inspection.rank_threads:RankThreads"},
)  # fmt: skip
