"""An engine core that does not finish its start while a test lasts."""

import time
from typing import Any


class SlowStart:
    def __init__(self, config: Any):
        time.sleep(120)
