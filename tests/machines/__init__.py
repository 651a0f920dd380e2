"""Test machines: Debian with its own kernel and NVMe drives in QEMU, for what a container cannot show.

README.md says what they can do.
"""
