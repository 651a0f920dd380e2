"""Test hosts: systemd machines in containers, reached over SSH, with recorded hardware instead of GPUs.

    python -m tests.hosts build            make the images (kept under .cache/, keyed by what they are made of)
    python -m tests.hosts up NAME          start a host; --image docker, --hardware h200_x4
    python -m tests.hosts mirror           start the machine that serves packages, weights and images to the hosts
    python -m tests.hosts down NAME        stop it and free what it held

Everything lives in one podman network (GPT_OSS_TEST_NETWORK, GPT_OSS_TEST_SUBNET when its addresses are taken).
"""
