"""The built-in ops: their schemas (``schemas``), what they mean (``reference``) and the composites' expansions
(``composites``)."""
