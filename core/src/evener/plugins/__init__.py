"""Finding, choosing and loading packages (design §3), each step a module.

==================  ===================================================================================
module              noun
==================  ===================================================================================
``discover``        reads entry points and descriptors into a ``catalog.Catalog``
``probe``           ``ProbeRun``: asks each backend whether its hardware is here
``choose``          one backend, and the packages whose needs it serves: a ``Selection``
``load``            imports the chosen packages and hands out what they deliver: ``Loaded``
``report``          the steps above as text and as JSON
``options``         checks a package's options against its descriptor
``torch_marks``     for backends: what ``torch/version.py`` says, without importing torch
``pci``             for backends: what is on the PCI bus
==================  ===================================================================================

Start-up is ``discover() -> choose(catalog) -> load(selection)``. Nothing here imports torch;
``load`` imports packages that may.
"""
