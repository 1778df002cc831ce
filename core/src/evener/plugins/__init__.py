"""Finding, choosing and loading packages (design §3), one module for each step.

===============  ===========================================================================================
module           what it holds
===============  ===========================================================================================
``discover``     ``installed_catalog``: reads and checks entry points and descriptors; a ``catalog.Catalog``
``catalog``      ``Catalog``: the installed packages, as their descriptors describe them; ``Provided``
``guard``        limits on descriptors and marks, which run in this process, and on packages' texts
``probe``        ``ProbeRun``: asks each backend whether its hardware is here
``probe_child``  the child process in which a probe runs
``choose``       one backend, and the packages whose needs it serves: a ``Selection``
``load``         imports the chosen packages: ``LoadedPackages``, with their objects as ``Provided``
``hook_check``   checks of hooks before they are registered, and of the objects that they return
``report``       the steps above as text and as JSON
===============  ===========================================================================================

Start-up is ``installed_catalog() -> choose(catalog) -> load(selection)``. Nothing here imports torch; the packages that
``load`` imports may.
"""
