"""What crosses between front end, controller and worker: plain data, and the interfaces of both ends.

================  ====================================================================================
module            holds, in reading order
================  ====================================================================================
``messages``      the messages between front end and controller
``plan``          the plan of one step, and its result
``media``         the media of one step
``client``        ``EngineClient``: how a front end uses an engine
``executor``      ``Executor``: how a controller uses its workers
``child_spec``    what a child process reads first: its configuration and its place
``slabs``         how much of the pool one request's state fills; both sides count it
``pooling``       what a package does for models that embed or score texts
``installed``     the parts of connectors, adapters (LoRA) and commands, which installed packages have
================  ====================================================================================
"""
