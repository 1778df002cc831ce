"""The built-in ops: schemas (``schemas``), the reference of primitive ops (``reference``) and of composite ops
(``composites`` and its neighbours)."""
