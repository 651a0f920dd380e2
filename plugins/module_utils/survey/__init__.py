"""Reads what a host is and has. Changes nothing, and runs on the host: standard library only, Python 3.8 or newer."""
