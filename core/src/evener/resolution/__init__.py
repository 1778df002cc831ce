"""Resolution: before the first step every op, state slot and linear weight of a model gets its provider or layout.

In reading order: ``candidates`` (what there is to choose from, and why a kernel may not serve a call), ``resolver``
(choosing), ``manifest`` (the record of the choices), ``footprint`` (memory of a step), ``attribution`` (which package
raised an error), ``tuning`` (measured times).
"""
