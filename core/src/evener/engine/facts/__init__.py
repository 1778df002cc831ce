"""What a started worker and a started engine say of themselves: records that cross processes. Torch-free.

===================  =================================================================================
module               holds, in reading order
===================  =================================================================================
``memory_plan``      the memory plan of a device, and what was measured
``manifest_report``  who computes each op, and why
``engine_info``      what a started engine reports to its front end
``worker_facts``     what a started worker reports to its controller
===================  =================================================================================
"""
