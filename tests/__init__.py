"""Tests; a package so that helpers are imported as `tests.gateway.support` and file names may repeat."""
