"""Mixture-of-experts models that are larger than the accelerator's memory. Either the host computes the experts of some
layers (host layers), or the device computes all experts, and host memory keeps those that have no slot on the device.
Importing this package does not import torch.

An eager step is submitted kernel by kernel. A captured step is replayed from a recorded graph of a fixed size; padding
rows fill it up. An expert passes through the device if it is copied to a slot for one step, and then overwritten.

``evener_kv`` has the blocks that leave the prefix cache, ``evener_stages`` pipeline stages on different kinds of
devices, ``evener_weights`` sleep mode and new weights.

======================  ======================================================================================
module                  holds
======================  ======================================================================================
``layers``              which layers' experts are in host memory
``automatic``           how much device memory is lacking, for keys that are ``auto``
``placed_layers``       call sites and weights of those layers, and their placement
``host_backend``        the host's backend beside the device's: its kernels and packings
``numa``                pages of host memory on machines with several NUMA nodes
``host_experts``        host layers: the host computes their experts; copies to and from the host
``captured_experts``    experts that the host computes in captured steps, in which the device calls the host
``passing_slots``       sets of slots for experts that pass through the device in captured steps
``passing_places``      which experts pass
``passing_stage``       page-locked copies of the experts that pass
``choice_counts``       in how many captured steps each expert was chosen
``most_chosen``         lets the most chosen experts pass
``passing_part``        how many experts pass: set by the user, or measured
``passing_copies``      copies of the experts that pass, as a part of captured steps
``captured_passing``    captured steps in which experts pass
``captured_prompts``    prompts that are captured, except for experts in host memory
``captured_residents``  captured steps of layers with slots: the host computes the missing experts
``half_plans``          a step's rows, divided into two halves
``halves``              runs two halves in turns, and the host's work in a thread
``halving``             which steps are computed in halves: set by the user, or measured
``residents``           which experts of a layer are in slots: those that were used last
``passing_experts``     which experts are in slots that several layers share
``prefetch``            experts that are copied before the routing of their layer is known
``expert_ranks``        expert parallelism: a rank holds some of a layer's experts
``second_layout``       the same experts a second time, in a layout that another backend reads
``device_packing``      weights in host memory that the device packs
``expert_slots``        stacks of experts in host memory, and their slots on the device
``resident_layer``      slots of one or several layers; the order of copies and products
``slot_products``       what the device computes with experts in slots
``streamed_layers``     host layers in large steps: their experts pass through the device
``prompt_share``        experts of such large steps that the host computes meanwhile
``next_router``         which experts the next layer will probably need
``expert_costs``        whether the host computes an expert sooner than it is copied
``host_share``          missing experts that the host computes, of layers with slots
``resident_experts``    layers with slots: the device computes experts, some after a copy
======================  ======================================================================================
"""

from __future__ import annotations

from evener.contracts.descriptor import Descriptor, Option

descriptor = Descriptor(
    name="offload",
    summary="Host memory for experts and cached blocks; stages on unlike devices; sleep mode, changing weights.",
    contracts={"descriptor": 1, "experts": 1},
    placements={
        "host": "evener_offload.host_experts:HostExperts",
        "resident": "evener_offload.resident_experts:ResidentExperts",
        "ranks": "evener_offload.expert_ranks:builder_of",
    },
    engine_commands={"weights": "evener_weights.commands:WeightCommands"},
    stage_parts={
        "settle": "evener_stages.automatic:settle_keys",
        "check": "evener_stages.devices:check_stages",
        "config": "evener_stages.devices:config_of_stage",
        "device": "evener_stages.devices:device_of_rank",
        "meet": "evener_stages.assembly:meet",
        "assemble": "evener_stages.assembly:assemble_split",
    },
    cache_listeners={"files": "evener_kv.files.settings:check_files"},
    connectors={"host": "evener_kv.host:HostConnector", "transfer": "evener_kv.transfer.connector:TransferConnector",
                "host+transfer": "evener_kv.shared:SharedConnector"},
    options={
        "halves": Option(
            type=str, default="auto", choices=("auto", "on", "off"), help="With infer.cpu_layer_num or "
            "infer.host_experts: whether steps are computed in two halves, so that the host computes experts of one "
            "while the device computes the other; auto: where that is measured to be faster, but not captured steps."
        ),
        "stream_prompts": Option(
            type=str, default="auto", help="With infer.cpu_layer_num or infer.host_experts: experts of these layers "
            "are copied to the device, and computed there, in steps with many tokens: off, auto (where that is "
            "measured to be sooner), or the tokens of the smallest such step."
        ),
        "pass_experts": Option(
            type=str, default="off", help="The part of a layer's experts that is copied to the device, and computed "
            "there, in each captured decode step of many requests, while the host computes the others: off, auto (as "
            "many as let host and copies end together, by measured times), or a percent from 1 to 50 of all experts of "
            "the layer. With infer.cpu_layer_num or infer.host_experts; with infer.resident_experts only if "
            "offload.host_when_sooner is set, and only experts without a slot."
        ),
        "pass_experts_rows": Option(
            type=int, default=8, help="offload.pass_experts: rows of the smallest such step, with rows of padding."
        ),
        "pass_most_chosen": Option(
            type=bool, default=False, help="offload.pass_experts, with infer.cpu_layer_num or infer.host_experts: the "
            "most chosen experts of each layer pass, not its first ones. Host memory holds a second copy of them."
        ),
        "prefetch_experts": Option(
            type=bool, default=True, help="infer.resident_experts: while a layer is computed, copy the experts that "
            "the next layer's router would choose for its rows."
        ),
        "host_when_sooner": Option(
            type=str, default="off", help="infer.resident_experts: the host computes missing experts of small steps if "
            "that is sooner than copying them: off, auto (measured at the start), or a number (missing "
            "experts with at most so many rows). Unless off, it computes all that are missing in captured decode steps."
        ),
        "numa": Option(
            type=str, default="auto", help="Experts in host memory, on a machine with several NUMA nodes: auto (their "
            "pages are interleaved, so that the memory channels of all nodes are read), or off."
        ),
        "kv_transfer": Option(
            type=str, default=None, help="HOST:PORT under which other servers fetch KV cache blocks from this one, or "
            "from which it fetches theirs: prompts are computed on one, answers on another. Each rank needs one port "
            "more."
        ),
        "kv_peers": Option(
            type=str, default=None, help="The kv_transfer addresses of the servers that this one may fetch blocks "
            "from, with commas between them."
        ),
        "kv_key_file": Option(
            type=str, default=None, help="File with a key, which these servers share, of at least 16 bytes."
        ),
        "kv_transfer_seconds": Option(
            type=float, default=30.0, help="Seconds that a request waits for blocks of another server; then its prompt "
            "is computed here."
        ),
        "kv_hold_seconds": Option(
            type=float, default=120.0, help="Seconds that blocks of a prompt are held for the server that goes on."
        ),
        "kv_files": Option(
            type=str, default=None, help="Folder, of this user alone, for files with KV cache blocks: a tier behind "
            "infer.kv_host_memory, which outlives the server."
        ),
        "kv_files_bytes": Option(
            type=int, default=64 << 30, help="Bytes of these files for each rank; the least recently used blocks go."
        ),
        "kv_landing_bytes": Option(
            type=int, default=4 << 30, help="Bytes of host memory on each rank for blocks that arrive."
        ),
    },
)  # fmt: skip
