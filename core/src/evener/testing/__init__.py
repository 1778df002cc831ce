"""Fakes and small builders that ship with the core, for our tests and for those of plugin authors."""
