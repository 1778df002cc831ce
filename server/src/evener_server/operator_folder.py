"""A folder that a client names, below one of the operator's: a client must not make the server read any other."""

from __future__ import annotations

from pathlib import Path

from evener.errors import RequestError
from evener_server.errors import ApiError


def folder_below(root: str, path: str, param: str, option: str, code: str) -> Path:
    """The folder ``path``, absolute or relative to ``root``; links are followed.

    Args:
        param: the field of the request that names it.
        option: the key of ``root``.
        code: of the error.

    Raises:
        RequestError: ``path`` is no path.
        ApiError: 404, there is no such folder below ``root``.
    """
    try:
        above, folder = Path(root).expanduser().resolve(), Path(root).expanduser().joinpath(path).resolve()
        inside = folder.is_relative_to(above) and folder.is_dir()
    except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, links in a circle
        raise RequestError(f"{param} is no path of a folder: {error}", param) from error
    if not inside:
        raise ApiError(404, f"{param} is no folder below {option}; send one that is", param, code)
    return folder
