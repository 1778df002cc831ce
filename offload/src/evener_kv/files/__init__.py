"""Blocks of the prefix cache in files (``offload.kv_files``): a tier behind host memory, which outlives the server.

==================  ================================================================================================
module              holds
==================  ================================================================================================
``settings``        what the operator has set
``private_folder``  folders that this user alone can use, opened without following links
``block_files``     one rank's files: one for each block, with a checksum
``messages``        what the controller asks a rank, and its answers
``rank_files``      a rank's half: copies between host memory and files, in a thread
``stored_blocks``   the controller's half: which blocks are in files on all ranks, and copies under way
==================  ================================================================================================

Files are read and written only between host memory and disk: so blocks are checked on all ranks before a plan may name
them. The two halves speak over a socket in the folder, beside the plans.

Read before: the file backends of LMCache and of SGLang's HiCache, which have one file for each block, named by its key.
"""
