"""Tests of commands install packages as those of plugins do."""

from ..plugins.conftest import site as site
