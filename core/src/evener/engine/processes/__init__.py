"""Starting an engine: inline, in a thread, or in child processes, and the sockets and heartbeats between these.

====================  =====================================================================================
module                holds, in reading order
====================  =====================================================================================
``start``             ``start_engine``: builds the controller and the parts for the mode that was asked for
``local_clients``     engine clients whose controller runs in this process: inline, or in a thread
``process_client``    the engine client whose controller runs in a child process
``process_executor``  the executor whose workers run in child processes, one for each rank
``child``             the entry point of a child process: runs a worker or a controller
``child_process``     starting and ending a child, and the channel between it and its parent
``control_channel``   the sockets between a controller and its workers
``launch``            joining the processes of ``torchrun``: rank 0 goes on, the others become workers
``heartbeat``         how a process notices that another one hangs or is cut off
====================  =====================================================================================
"""
