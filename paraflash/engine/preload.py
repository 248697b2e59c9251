"""Imported once by the fork server, so that every worker it forks has torch loaded already.

Importing it makes the process deaf to SIGTERM: a signal for the whole service (a terminal, systemd) must not take the
workers away from requests that the frontend still finishes. The fork server ends when its parent does.
"""

from __future__ import annotations

import os
import signal

# Threads of OpenMP that spin while they wait take the cores from the other ranks. It is read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch  # noqa: F401

import paraflash.engine.worker  # noqa: F401

signal.signal(signal.SIGTERM, signal.SIG_IGN)
