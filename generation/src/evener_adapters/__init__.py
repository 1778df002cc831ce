"""Adapters of requests (LoRA): which are loaded, which have a place on the device, and how they are added to products.

===========  ==============================================================================
module       what it holds
===========  ==============================================================================
``lora``     constructs the three parts
``loaded``   the front end's part: names, folders, and who still uses what
``slots``    the controller's part: which adapters have a place on the device
``stacks``   a rank's part: the places beside each weight, and writing into them
``product``  the product of a weight that has such places
===========  ==============================================================================
"""
