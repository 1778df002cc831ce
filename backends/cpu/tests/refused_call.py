"""A system call that fails in this process, as a container's seccomp profile makes it fail."""

from __future__ import annotations

import ctypes
import errno
import struct

_PR_SET_NO_NEW_PRIVS, _SECCOMP, _SET_MODE_FILTER = 38, 317, 1
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ERROR, _ALLOW = 0x00050000, 0x7FFF0000


def refuse(number: int, first: int) -> None:
    """From now on the call ``number`` of x86-64 is not permitted with ``first`` as its first argument."""
    libc = ctypes.CDLL(None, use_errno=True)
    # Of struct seccomp_data: the number is at 0, the first argument at 16. A jump skips that many if unequal.
    program = [
        (_LOAD, 0, 0, 0), (_JUMP_IF_EQUAL, 0, 3, number), (_LOAD, 0, 0, 16), (_JUMP_IF_EQUAL, 0, 1, first),
        (_RETURN, 0, 0, _ERROR | errno.EPERM), (_RETURN, 0, 0, _ALLOW),
    ]  # fmt: skip
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *each) for each in program))
    header = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(program), ctypes.addressof(code)))
    assert libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
    assert libc.syscall(_SECCOMP, _SET_MODE_FILTER, 0, header) == 0, errno.errorcode[ctypes.get_errno()]
