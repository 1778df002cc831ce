"""What a step reads: the requests' tables on the device, and a plan as arrays.

===================  ==================================================================
module               what it holds
===================  ==================================================================
``device_tables``    token ids, block tables and sampling parameters on the device
``step_layout``      the arrays of a step, sent to the device in one upload
``captured_inputs``  the inputs of captured steps, at fixed addresses
===================  ==================================================================
"""
