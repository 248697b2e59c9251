"""Puts the repository root on the path: `training` is a folder of scripts, not an installed package."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[2])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
